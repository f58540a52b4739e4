"""A stage that FCDP shards, as PyTorch's schedules call it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import fcdp
from baselines.pipeline.stage import Stage
from fcdp import fsdp2
from fcdp.engine import engine_of
from fcdp.unit import Unit

#: By zero bubble: some weights whose gradients are due, as nodes of the graph (``params``), and the
#: gradients of activations from which they are computed.
_Due = dict[str, Any]


class _MicroBatches(nn.Module):
    """A stage whose forwards are micro-batches of one step, so that the cache keeps its root too.

    PyTorch's schedules gather a module of FSDP2 once per step, and keep its gradients whole. They
    look at the module's class: of this one they know nothing, and FCDP's own hooks gather and
    reduce.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, arrived: Any, batch: torch.Tensor) -> torch.Tensor:
        with fcdp.accumulate(self.stage, last=False):
            out: torch.Tensor = self.stage(arrived, batch)
        return out


class CachedStage(PipelineStage):
    """Gathers parameters for each micro-batch, and sums up 1/L of the gradients until the last."""

    def __init__(self, stage: Stage, *args: Any, **kwargs: Any) -> None:
        """``args`` and ``kwargs`` are those of ``PipelineStage``."""
        super().__init__(_MicroBatches(stage), *args, **kwargs)
        self._stage = stage
        self._units = units = engine_of(stage).units
        self._root = fsdp2.state(stage)  # type: ignore[arg-type]
        #: Blocks, and the stage around them, that train weights, in backward's order; their units.
        self._parts = [
            (part, [unit for unit in units if id(unit.module) in {*map(id, part.modules())}])
            for part in _trained_parts(stage, units)
        ]

    def gather_ahead(self) -> None:
        """Gather what the optimizer has written into the cache, one unit at a time.

        A later stage does so while it waits for its first micro-batch: at the same time as the
        stages before it, and not after them.
        """
        if self.is_first or engine_of(self._stage).topology.nodes == 1:
            return
        with fcdp.accumulate(self._stage, last=False):
            for unit in self._units:
                if unit.trainable:
                    unit.module.unshard()
                    unit.module.reshard()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[_Due] | None]:
        if backward_type == "input":
            # FSDP2 gathers and reshards, and finds no gradients to reduce.
            groups = [unit.group for unit in self._units]
            wholes: Iterator[Any] = chain.from_iterable(map(fsdp2.wholes, groups))
            outputs, inputs = bwd_kwargs["stage_output"], bwd_kwargs["input_values"]
            return stage_backward_input(outputs, bwd_kwargs["output_grads"], inputs, wholes)
        with fcdp.accumulate(self._stage, last=False):
            if backward_type == "weight":
                self._backward_weights(bwd_kwargs["param_groups"])
                return (), None
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )

    def _backward_weights(self, due: Sequence[_Due]) -> None:
        """Compute and reduce the gradients of weights, one block at a time.

        Most of FSDP2's hooks are not on the way to them: they are on what goes in and out of
        blocks. What these would do is done here, where it counts as one backward.
        """
        # Where one of the hooks is on the way all the same, it must not end the backward.
        self._root._state_ctx.post_backward_final_callback_queued = True
        for part, units in self._parts:
            due = self._backward_part(part, units, due)
        assert not due, "a weight is a block's, or outside of blocks"
        self._root._root_post_backward_final_callback()

    def _backward_part(
        self, part: nn.Module, units: Sequence[Unit], due: Sequence[_Due]
    ) -> list[_Due]:
        """Compute and reduce gradients of a part's own weights; return what is due of others."""
        fsdp2.state(part)._pre_backward(None)  # type: ignore[arg-type]
        weights = {*map(id, part.parameters())}
        own, others = list[_Due](), list[_Due]()
        for each in due:
            is_own = all(id(node.variable) in weights for node in each["params"])
            (own if is_own else others).append(each)
        stage_backward_weight(part.parameters(), own)
        for unit in units:
            unit.group.post_backward()
        return others

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Have the sums cross nodes, when the last gradient is on its way to the stage before.

        In the last backward they would hold that message up. FSDP2 is told that one more backward
        has ended, and FCDP has it reduce zeros, to which the sums are added.
        """
        with fcdp.accumulate(self._stage, last=True):
            self._root._root_post_backward_final_callback()
        self.scale_grads(grad_scale_factor)


def _trained_parts(stage: Stage, units: Sequence[Unit]) -> Iterator[nn.Module]:
    """Blocks that train weights, the last first; the stage, if one is trained outside of blocks."""
    for block in reversed(stage.blocks):
        if any(param.requires_grad for param in block.parameters()):
            yield block
    inside = {id(module) for block in stage.blocks for module in block.modules()}
    if any(unit.trainable for unit in units if id(unit.module) not in inside):
        yield stage
