"""Blocks whose activations are recomputed in backward, but for what is kept elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from baselines.fuyou.cost import Item
from baselines.fuyou.fifo import Fifo
from baselines.fuyou.swap import Swapper

#: Matrix products, whose outputs may be kept.
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
#: A product of a forward: its block, and its place among the products of the block.
Product = tuple[int, int]


@dataclass
class Profile:
    """What forward computes: operations in the blocks, and each product that may be kept."""

    flops: float
    between: int
    items: dict[Product, Item]


class Recomputed:
    """The blocks of a model, each a node of autograd's graph that computes its forward again."""

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
        self.device = device
        #: Products whose outputs are kept.
        self.kept: frozenset[Product] = frozenset()
        self.profile = Profile(0.0, 0, {})
        #: Has outputs need a gradient where a block's parameters do and its input does not.
        self._marker = torch.zeros((), device=device, requires_grad=True)
        for index, block in enumerate(blocks):
            trained = any(param.requires_grad for param in block.parameters())
            block.forward = functools.partial(self._forward, index, block.forward, trained)

    def begin_profile(self) -> None:
        """Count the next forward."""
        self.profile = Profile(0.0, 0, {})

    def _forward(
        self, index: int, original: Callable[..., Any], trained: bool, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, spec = tree_flatten((args, kwargs))

        def compute(given: Sequence[Any]) -> Any:
            positional, named = tree_unflatten(list(given), spec)
            return original(*positional, **named)

        if not torch.is_grad_enabled():
            self.fifo.acquire(index)
            found = compute(leaves)
            self.fifo.release(index)
            return found
        call = _Call(self, index, compute)
        apply: Any = _Block.apply
        outputs = apply(call, self._marker if trained else None, *leaves)
        return call.rebuilt(outputs)

    def counted(self, index: int, place: int, func: Any, args: Any, out: Any) -> None:
        """Note what an operation of a forward takes; ``place``: -1 where it is no product."""
        flops = flop_registry.get(func.overloadpacket)
        count = float(flops(*args, out_val=out)) if flops else 0.0
        self.profile.flops += count
        if place >= 0:
            self.profile.items[index, place] = Item(out.nbytes, count)


class _Call:
    """One call of a block in a forward, and what its backward needs."""

    def __init__(self, of: Recomputed, index: int, compute: Callable[[Sequence[Any]], Any]) -> None:
        self.of = of
        self.index = index
        self._compute = compute
        self._leaves: list[Any] = []
        self._swapped: list[int] = []
        self._spec: Any = None
        self._others: list[Any] = []
        self._random = torch.get_rng_state()
        self._device_random = self._device_state()

    def forward(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Compute the block, and keep its inputs that need a gradient elsewhere."""
        self.of.fifo.acquire(self.index)
        inputs = [_apart(leaf) for leaf in leaves]
        # With a graph, which is dropped: some operations choose their kernel by whether there is
        # one, and what is computed again must be the same.
        with torch.enable_grad(), _Forward(self.of, self.index):
            outputs, self._spec = tree_flatten(self._compute(inputs))
        self.of.fifo.release(self.index)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        self._others = [None if isinstance(o, torch.Tensor) else (o,) for o in outputs]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self.of.swapper.put((self.index, "input", place), leaf)
                self.of.profile.between += leaf.nbytes
                self._swapped.append(place)
                self._leaves.append(None)
            else:
                self._leaves.append(leaf)
        return tuple(tensor.detach() for tensor in tensors)

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the block returned, of autograd's own tensors."""
        given = iter(tensors)
        leaves = [next(given) if other is None else other[0] for other in self._others]
        return tree_unflatten(leaves, self._spec)

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Compute the block again, and its gradients; those of its inputs are returned."""
        self.of.fifo.acquire(self.index)
        # And what the block before it has kept, whose backward is next.
        self.of.swapper.expect_of((self.index, self.index - 1))
        inputs = list(self._leaves)
        for place in self._swapped:
            found = self.of.swapper.get((self.index, "input", place))
            inputs[place] = found.requires_grad_()
        now, device_now = torch.get_rng_state(), self._device_state()
        self._set_random(self._random, self._device_random)
        with torch.enable_grad(), _Again(self.of, self.index):
            outputs, _ = tree_flatten(self._compute(inputs))
        self._set_random(now, device_now)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        pairs = [
            (output, gradient)
            for output, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        del outputs, tensors, pairs
        found_gradients: list[torch.Tensor | None] = [None] * len(inputs)
        for place in self._swapped:
            found_gradients[place] = inputs[place].grad
        self.of.collect(self.index)
        self.of.fifo.release(self.index)
        return found_gradients

    def _device_state(self) -> torch.Tensor | None:
        device = self.of.device
        if device.type == "cpu":
            return None
        state: torch.Tensor = torch.get_device_module(device).get_rng_state()
        return state

    def _set_random(self, host: torch.Tensor, device: torch.Tensor | None) -> None:
        torch.set_rng_state(host)
        if device is not None:
            torch.get_device_module(self.of.device).set_rng_state(device)


class _Block(torch.autograd.Function):
    """A block in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, marker: Any, *leaves: Any) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return call.forward(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *ctx.call.backward(gradients)


class _Products(TorchDispatchMode):
    """Counts the products of one block's pass."""

    def __init__(self, of: Recomputed, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = of
        self._index = index
        self._count = 0

    def _place(self, func: Any) -> int:
        """Which product this is; -1 for what is none."""
        if func not in _PRODUCTS:
            return -1
        self._count += 1
        return self._count - 1

    def _is_kept(self, place: int) -> bool:
        return (self._index, place) in self._of.kept


class _Forward(_Products):
    """Keeps outputs of products that are chosen, and counts all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        place = self._place(func)
        if self._is_kept(place):
            self._of.swapper.put((self._index, "product", place), out)
        self._of.counted(self._index, place, func, args, out)
        return out


class _Again(_Products):
    """Takes outputs that were kept instead of computing them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._place(func)
        if self._is_kept(place):
            return self._of.swapper.get((self._index, "product", place))
        return func(*args, **(kwargs or {}))


def _apart(leaf: Any) -> Any:
    """The same values outside of the graph."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
