"""A stage that FCDP shards, as PyTorch's schedules call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

import fcdp
from baselines.pipeline.stage import Stage
from fcdp.engine import engine_of


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

    def gather_ahead(self) -> None:
        """Gather what the optimizer has written into the cache, one unit at a time.

        A later stage does so while it waits for its first micro-batch: at the same time as the
        stages before it, and not after them.
        """
        engine = engine_of(self._stage)
        if self.is_first or engine.topology.nodes == 1:
            return
        with fcdp.accumulate(self._stage, last=False):
            for unit in engine.units:
                if unit.trainable:
                    unit.module.unshard()
                    unit.module.reshard()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        assert backward_type == "full", "FCDP reduces after a whole backward"
        with fcdp.accumulate(self._stage, last=False):
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Have the sums cross nodes, when the last gradient is on its way to the stage before.

        In the last backward they would hold that message up. FSDP2 is told that one more backward
        has ended, and FCDP has it reduce zeros, to which the sums are added.
        """
        with fcdp.accumulate(self._stage, last=True):
            fully_shard.state(self._stage)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        self.scale_grads(grad_scale_factor)
