"""A stage: the whole model's own forward, of which this rank computes some blocks.

Nothing needs to be known of a family, since masks, positions and rotary tables are computed where
they are used. What another stage holds is zeros here that take no memory, and its blocks hand on
what they are given. What arrives takes the place of the first own block's input, and what the last
own block returns ends the forward, but on the last stage, which goes on to the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from baselines.pipeline.cut import Anatomy, Seam
from baselines.strategy import Job, Loss

#: Values of a block that a model may look at, as its kind of attention.
_PLAIN = (bool, int, float, str, type(None))


class _Left(BaseException):
    """Ends a forward with what the last own block returned: the rest is another stage's.

    No ``Exception``, which a model or a loss may catch.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class _Elsewhere(nn.Module):
    """A stand-in for another stage's block."""

    def __init__(self, block: nn.Module, seam: Seam) -> None:
        super().__init__()
        for name, value in vars(block).items():
            if not name.startswith("_") and isinstance(value, _PLAIN):
                setattr(self, name, value)
        self._seam = seam

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._seam.given(tree_flatten((args, kwargs))[0][self._seam.argument])


class Stage(nn.Module):
    """Consecutive blocks of a model, and what is outside of blocks if they are the first or last.

    ``forward`` takes what arrives (of the first stage anything: it is not looked at) and the
    micro-batch, and returns the tensor to hand on, of the last stage the mean loss, a scalar.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        job: Job,
        anatomy: Anatomy,
        runs: Sequence[range],
        index: int,
        *,
        tracks: bool = False,
    ) -> None:
        """Cut all but stage ``index`` out of the model.

        ``runs``: the blocks of each stage. ``tracks``: what is handed on needs a gradient in any
        case, also where nothing before it is trained.
        """
        super().__init__()
        self.model = model
        #: Called with the model and a micro-batch: the loss, or a measure.
        self.function: Loss = job.loss
        self.index = index
        self.is_first, self.is_last = index == 0, index == len(runs) - 1
        self._tracks = tracks
        #: Bytes that the last micro-batch has handed on, and that its gradient hands back: none
        #: where nothing before this stage is trained.
        self.left_bytes = self.gradient_bytes = 0
        run = runs[index]
        own = [*blocks[run.start : run.stop]]
        self._seams = anatomy.seams[run.start], anatomy.seams[run.stop - 1]
        self._arrived: torch.Tensor | Callable[[], torch.Tensor] | None = None
        stand_ins = {
            id(block): _Elsewhere(block, seam)
            for block, seam in zip(blocks, anatomy.seams, strict=True)
            if block not in own
        }
        for parent in [*model.modules()]:
            for name, child in parent._modules.items():
                parent._modules[name] = stand_ins.get(id(child), child)
        held = anatomy.outside_of(index, len(runs))
        _drop(model, [*held, *(param for block in own for param in block.parameters())], job)
        self.blocks = own

    def join(self) -> None:
        """Connect the own blocks to what arrives and leaves.

        After FSDP2 has wrapped them: what arrives must be in its place before FSDP2 looks at a
        block's inputs, and a forward must not end before FSDP2 has done with the block.
        """
        if not self.is_first:
            self.blocks[0].register_forward_pre_hook(self._arrive, prepend=True, with_kwargs=True)
        if not self.is_last:
            self.blocks[-1].register_forward_hook(self._leave)

    def forward(self, arrived: Any, batch: torch.Tensor) -> torch.Tensor:
        self._arrived = arrived
        try:
            return self.function(self.model, batch)
        except _Left as left:
            # A schedule that detaches outputs in place cannot detach views.
            tensor = left.tensor.clone() if left.tensor._is_view() else left.tensor
            self.left_bytes = tensor.nbytes
            if self._tracks and torch.is_grad_enabled() and not tensor.requires_grad:
                return tensor.detach().requires_grad_()
            return tensor
        finally:
            self._arrived = None

    def _arrive(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        at, arrived = self._seams[0].argument, self._arrived
        tensor = arrived() if callable(arrived) else arrived
        assert tensor is not None, "only the first stage is given nothing"
        leaves[at] = tensor
        self.gradient_bytes = tensor.nbytes * tensor.requires_grad
        return tree_unflatten(leaves, structure)

    def _leave(self, _: nn.Module, __: Any, returned: Any) -> None:
        raise _Left(self._seams[1].taken(returned))


def skeleton(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[nn.Module, Sequence[nn.Module]]:
    """A model and its blocks over the same parameters and buffers, to be cut apart from it."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy((model, blocks), {id(tensor): tensor for tensor in tensors})


def _drop(model: nn.Module, held: Sequence[nn.Parameter], job: Job) -> None:
    """Replace all parameters but those held by zeros of their shape, which take no memory."""
    ids, device = set(map(id, held)), job.topology.mesh.device_type
    for module in model.modules():
        for name, param in [*module._parameters.items()]:
            if param is None or id(param) in ids:
                continue
            dtype = job.dtype if param.is_floating_point() else param.dtype
            del module._parameters[name]
            setattr(module, name, torch.zeros((), dtype=dtype, device=device).expand(param.shape))
