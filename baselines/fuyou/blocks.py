"""Blocks whose activations are recomputed in backward, but for those that are swapped out."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.nn as nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.flop_counter import flop_registry

from baselines.fuyou.cost import Item
from baselines.fuyou.fifo import Fifo
from baselines.fuyou.swap import Swapper

#: Matrix products, whose outputs may be swapped out.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
#: A product of a forward: its block, and its place among the products of the block.
Product = tuple[int, int]


@dataclass
class Profile:
    """Work of forward: operations in blocks, bytes between them, products that may be swapped."""

    flops: float = 0.0
    between: int = 0
    items: dict[Product, Item] = field(default_factory=dict)


class Recomputed:
    """The blocks of a model under PyTorch's checkpointing, each while its parameters are there."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        fifo: Fifo,
        swapper: Swapper,
        collect: Callable[[int], None],
        device: torch.device,
    ) -> None:
        """``collect`` is called with a block when all of its gradients are there."""
        self.fifo = fifo
        self.swapper = swapper
        self.collect = collect
        #: Products whose outputs are swapped out instead of being computed again.
        self.swapped: frozenset[Product] = frozenset()
        self.profile = Profile()
        #: Has outputs need a gradient where a block's parameters do and its input does not.
        self._marker = torch.zeros((), device=device, requires_grad=True)
        for index, block in enumerate(blocks):
            trained = any(param.requires_grad for param in block.parameters())
            block.forward = functools.partial(self._forward, index, block.forward, trained)

    def _forward(
        self, index: int, original: Callable[..., Any], trained: bool, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        returned: list[TreeSpec] = []

        def compute(leaves: Sequence[Any]) -> Any:
            positional, named = tree_unflatten(list(leaves), spec)
            return original(*positional, **named)

        def run(_marker: Any, *leaves: Any) -> tuple[Any, ...]:
            if torch.is_grad_enabled():
                with _Products(self, index, again=True):
                    outputs, _ = tree_flatten(compute(leaves))
                return tuple(outputs)
            # With a graph, which is dropped: some operations choose their kernel by whether there
            # is one, and what is computed again must be the same.
            self.fifo.acquire(index)
            # Saved in memory; detached, lest a tensor hold the graph that holds it.
            saving = saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
            with torch.enable_grad(), saving, _Products(self, index, again=False):
                outputs, form = tree_flatten(compute([_apart(leaf) for leaf in leaves]))
            self.fifo.release(index)
            returned.append(form)
            return tuple(each.detach() if _is_tensor(each) else each for each in outputs)

        if not torch.is_grad_enabled():
            self.fifo.acquire(index)
            outputs = compute(leaves)
            self.fifo.release(index)
            return outputs
        if trained or any(_is_tensor(leaf) and leaf.requires_grad for leaf in leaves):
            with self._inputs_elsewhere(index):
                # Not by ``checkpoint``, whose first call loads a compiler, in the device's budget.
                apply: Any = CheckpointFunction.apply
                outputs = apply(run, True, self._marker if trained else None, *leaves)
            node = next(each.grad_fn for each in outputs if _is_tensor(each) and each.requires_grad)
            node.register_prehook(lambda _: self._begin_backward(index))
            node.register_hook(lambda *_: self._end_backward(index))
        else:
            with torch.no_grad():
                outputs = run(None, *leaves)
        return tree_unflatten(list(outputs), returned[0])

    def _inputs_elsewhere(self, index: int) -> saved_tensors_hooks:
        """A context in which a block's inputs that need a gradient are swapped out."""
        places = count()

        def pack(tensor: torch.Tensor) -> Any:
            if not tensor.requires_grad or tensor.data_ptr() == self._marker.data_ptr():
                return tensor
            name = (index, "input", next(places))
            self.swapper.put(name, tensor)
            self.profile.between += tensor.nbytes
            return name

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else self.swapper.get(packed)

        return saved_tensors_hooks(pack, unpack)

    def _begin_backward(self, index: int) -> None:
        self.fifo.acquire(index)
        # And activations of the block before it, whose backward is next.
        self.swapper.expect_of((index, index - 1))

    def _end_backward(self, index: int) -> None:
        self.collect(index)
        self.fifo.release(index)


class _Products(TorchDispatchMode):
    """Counts the products of one block's pass, and swaps out outputs of those that are chosen.

    ``again``: takes these back instead of computing them.
    """

    def __init__(self, of: Recomputed, index: int, *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of
        self._index = index
        self._again = again
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product, place = func in _PRODUCTS, self._count
        self._count += is_product
        name = (self._index, "product", place)
        is_swapped = is_product and (self._index, place) in self._of.swapped
        if is_swapped and self._again:
            return self._of.swapper.get(name)
        out = func(*args, **(kwargs or {}))
        if is_swapped:
            self._of.swapper.put(name, out)
        if not self._again:
            flops = flop_registry.get(func.overloadpacket)
            operations = float(flops(*args, out_val=out)) if flops else 0.0
            self._of.profile.flops += operations
            if is_product:
                self._of.profile.items[self._index, place] = Item(out.nbytes, operations)
        return out


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _apart(leaf: Any) -> Any:
    """The same values, detached from the graph."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
