"""The update rules, and the slots in which micro-batches pass the stages (papers' 2.1 and 2.3).

Micro-batches and stages are numbered from 0; there are as many of the one as of the other. A slot
is the time of one stage's forward, or backward, of one micro-batch.
"""

from __future__ import annotations

from typing import Literal

#: ``dp``: all micro-batches use the newest parameters, behind a barrier; ``v1``: all use those of
#: one step ago; ``v2``: each stage's newest that are there when the micro-batch comes to it.
Rule = Literal["dp", "v1", "v2"]


def is_fresh(rule: Rule, micro_batch: int, stage: int, stages: int) -> bool:
    """Whether a micro-batch computes a stage with the parameters of this step, not of the last."""
    if rule == "v2":
        return micro_batch + stage >= stages - 1
    return rule == "dp"


def forward_slot(micro_batch: int, stage: int) -> int:
    """The slot of a stage's forward, counted from the start of the step."""
    return 2 * micro_batch + stage


def backward_slot(micro_batch: int, stage: int, stages: int) -> int:
    """The slot of a stage's backward, counted from the start of the step."""
    return 2 * micro_batch + 2 * stages - 1 - stage


def slots_per_step(stages: int) -> int:
    """Slots from the start of one step to that of the next."""
    return 2 * stages
