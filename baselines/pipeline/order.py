"""The order in which a group of nodes computes its stages' micro-batches, for each schedule.

Imports no torch: the simulator orders a step's tasks by it, too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from baselines.settings import PipelineSchedule

#: Counts in the cache: those of a search.
_REMEMBERED = 4096
#: Forward; backward; by zero bubble, its gradients of activations and of weights apart.
Kind = Literal["forward", "backward", "activations", "weights"]
#: Kind of a computation, its stage and its micro-batch.
Action = tuple[Kind, int, int]


def order(
    name: PipelineSchedule, group: int, groups: int, per_group: int, micro_batches: int
) -> list[Action]:
    """A group's actions of one step, as PyTorch's schedules order them.

    Raises ``ValueError`` for micro-batches that are no whole rounds of interleaved stages.
    """
    stages, batches = range(group, groups * per_group, groups), range(micro_batches)
    if name == "gpipe":
        return [*_all("forward", stages, batches), *_all("backward", stages, batches)]
    if name == "looped":
        last = _all("backward", stages[::-1], batches[::-1])
        return [*_all("forward", stages, batches), *last]
    rounds = max(1, micro_batches // groups)
    if micro_batches % rounds:
        raise ValueError(
            f"pipeline_schedule = {name!r}: {micro_batches} micro-batches are no {rounds} rounds "
            "of equally many; allowed are multiples of the stages' groups"
        )
    of_round, total = micro_batches // rounds, per_group * micro_batches
    first = ahead(name, group, groups, per_group, micro_batches)
    forwards = _counted("forward", stages, of_round, total)
    back: Kind = "activations" if name == "zb" else "backward"
    backwards = [*_counted(back, stages[::-1], of_round, total)]
    weights = [("weights", *of[1:]) for of in backwards] if name == "zb" else []
    actions: list[Action] = [next(forwards) for _ in range(first)]
    for at, backward in enumerate(backwards):
        actions += [*([next(forwards)] if at + first < total else []), backward]
        if weights and at >= group:
            actions.append(weights.pop(0))  # type: ignore[arg-type]
    return [*actions, *weights]  # type: ignore[list-item]


def ahead(
    name: PipelineSchedule, group: int, groups: int, per_group: int, micro_batches: int
) -> int:
    """The forwards that a group computes before its first backward comes after each further one."""
    total = per_group * micro_batches
    if name in ("gpipe", "looped"):
        return total
    # Forwards in flight beyond the last group's, for each group that follows.
    more = 1 if name in ("1f1b", "zb") else 2
    of_round = micro_batches // max(1, micro_batches // groups)
    return min((per_group - 1) * of_round + more * (groups - 1 - group), total)


def _all(kind: Kind, stages: Sequence[int], batches: Sequence[int]) -> Iterator[Action]:
    return ((kind, stage, batch) for stage in stages for batch in batches)


def _counted(kind: Kind, stages: Sequence[int], of_round: int, total: int) -> Iterator[Action]:
    """Actions that go through the stages round by round, each stage's micro-batches in order."""
    count = dict.fromkeys(stages, 0)
    for step in range(total):
        stage = stages[step // of_round % len(stages)]
        yield kind, stage, count[stage]
        count[stage] += 1


class InFlight(NamedTuple):
    """The most micro-batches of which a stage has so much at once."""

    activations: int
    #: By zero bubble, gradients of activations from which those of weights are computed later. The
    #: first stage has none: PyTorch computes all of its gradients at once.
    gradients: int


@lru_cache(maxsize=_REMEMBERED)
def in_flight(
    name: PipelineSchedule, group: int, groups: int, per_group: int, micro_batches: int
) -> Mapping[int, InFlight]:
    """The most micro-batches that each stage of a group has in flight."""
    now: Counter[int] = Counter()
    due: Counter[int] = Counter()
    most: dict[int, InFlight] = {}
    for kind, stage, _ in order(name, group, groups, per_group, micro_batches):
        now[stage] += (kind == "forward") - (kind in ("backward", "weights"))
        due[stage] += (stage > 0) * ((kind == "activations") - (kind == "weights"))
        before = most.get(stage, InFlight(0, 0))
        most[stage] = InFlight(*map(max, before, (now[stage], due[stage])))
    return most


def bubble(name: PipelineSchedule, groups: int, stages_per_node: int, micro_batches: int) -> float:
    """The share of a step in which a node waits, were messages free and stages of equal cost.

    Each of ``groups``, of one node or several that share their stages, computes a part of a round.

    A backward counts two forwards; zero bubble fills what waits with gradients of weights, and
    leaves a third of it.
    """
    waits = (groups - 1) / (3 if name == "zb" else 1)
    return waits / (stages_per_node * micro_batches + waits)
