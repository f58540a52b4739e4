"""The order in which a stage computes micro-batches: PyTorch's schedules, and one more."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from baselines.pipeline.order import order
from baselines.settings import PipelineSchedule


class SendsAhead(_PipelineScheduleRuntime):
    """1F1B with one more forward in flight for each stage that follows.

    PyTorch's own 1F1B waits for each message, and on a slow link computes nothing meanwhile. Here
    a stage has another micro-batch to compute while one is on its way, there and back.
    """

    def __init__(self, stages: list[Any], micro_batches: int, **more: Any) -> None:
        super().__init__(stages, micro_batches, **more)  # type: ignore[no-untyped-call]
        ranks = range(self.pp_group_size)
        self.pipeline_order = {rank: self._order(rank, micro_batches) for rank in ranks}
        self._prepare_schedule_with_comms(self.pipeline_order)

    def _order(self, rank: int, micro_batches: int) -> list[_Action | None]:
        actions = order("ahead", rank, self.pp_group_size, 1, micro_batches)
        return [_Action(stage, _KINDS[kind], at) for kind, stage, at in actions]


_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}
#: By name, with whether it is given one stage or a list.
_SCHEDULES: dict[PipelineSchedule, tuple[Callable[..., Any], bool]] = {
    "gpipe": (ScheduleGPipe, False),
    "1f1b": (Schedule1F1B, False),
    "ahead": (SendsAhead, True),
    "interleaved": (ScheduleInterleaved1F1B, True),
    "looped": (ScheduleLoopedBFS, True),
    "zb": (ScheduleInterleavedZeroBubble, True),
}


def make(name: PipelineSchedule, stages: Sequence[PipelineStage], micro_batches: int) -> Any:
    """The schedule of this name, over this rank's stages, whose last returns its mean loss."""
    kind, several = _SCHEDULES[name]
    loss: Callable[[torch.Tensor, Any], torch.Tensor] = lambda returned, _: returned  # noqa: E731
    return kind([*stages] if several else stages[0], micro_batches, loss_fn=loss)
