"""Consecutive blocks in runs of about equal cost: a cycle's stages.

Imports no engine, for programs that must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


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
