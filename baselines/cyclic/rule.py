"""The update rules, and the slots in which micro-batches pass the stages (papers' 2.1 and 2.3).

Micro-batches and stages are numbered from 0; there are as many of the one as of the other. A slot
is the time of one stage's forward, or backward, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal


def chosen(stages: int | None, costs: Sequence[float], most: int, called: str) -> list[range]:
    """Cut blocks of these costs into stages: ``most`` of them, unless chosen.

    ``called`` says what there are ``most`` of. Raises ``ValueError`` for more stages than blocks or
    than that.
    """
    count = most if stages is None else stages
    if count > min(most, len(costs)):
        raise ValueError(
            f"stages = {count}: allowed are 1 to {min(most, len(costs))}, as there are "
            f"{most} {called} and {len(costs)} blocks"
        )
    return partition(costs, count)


def partition(costs: Sequence[float], stages: int) -> list[range]:
    """Cut consecutive blocks into ``stages`` runs, where the costs up to each cut are nearest.

    Every run has at least one block. Raises ``ValueError`` for more stages than blocks, for fewer
    than one, and for a cost below 0.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"stages = {stages}: allowed are 1 to {len(costs)}, the number of blocks")
    if min(costs) < 0:
        raise ValueError(f"costs = {[*costs]}: allowed are numbers from 0")
    upto = [0.0, *accumulate(costs)]
    cuts = [0]
    for stage in range(1, stages):
        wanted = upto[-1] * stage / stages
        places = range(cuts[-1] + 1, len(costs) - (stages - stage) + 1)
        cuts.append(min(places, key=lambda place: abs(upto[place] - wanted)))
    cuts.append(len(costs))
    return [range(begin, end) for begin, end in pairwise(cuts)]


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
