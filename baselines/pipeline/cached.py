"""A stage that FCDP shards, as PyTorch's schedules call it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage

import fcdp
from baselines.pipeline.stage import Stage


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

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        assert backward_type == "full", "FCDP reduces after a whole backward"
        with fcdp.accumulate(self._stage, last=last_backward):
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )
