"""What a rank of a cycle sends in each slot of its step, and what graphs keep in each."""

from __future__ import annotations

from baselines.cyclic.rule import slots_per_step
from simulation.cycle.held import held
from simulation.cycle.stages import cycle_of, stages_of
from simulation.workload import Workload

_FP32 = 4


def sent(workload: Workload, ranks: int) -> list[float] | None:
    """Bytes that a rank sends in each slot, at most, forwards before backwards.

    ``None`` where ranks do not pass stages on. Raises ``ValueError`` as ``stages_of``.
    """
    if workload.served or not workload.schedule.passes_on:
        return None
    stages = stages_of(workload, ranks)
    cycle = cycle_of(workload, stages, ranks)
    sizes, slots = stages.sizes(twice=cycle.twice), 2 * cycle.stages
    by_rank = [[0.0] * slots for _ in range(ranks)]
    for message in cycle.messages():
        if message.source != message.target:
            forward = message.kind == "forward"
            slot = message.stage if forward else slots - 1 - message.stage
            by_rank[message.source][slot] += _FP32 * sizes[message.kind][message.stage]
    return [max(of_slot) for of_slot in zip(*by_rank, strict=True)]


def kept(workload: Workload, ranks: int, nbytes: float) -> tuple[list[float], float] | None:
    """Bytes of activations in each slot, and what all micro-batches of a step at once would keep.

    ``nbytes`` are those of a step's fullest moment, which all slots have. ``None`` where
    micro-batches do not take turns.
    """
    if workload.served or workload.schedule.cycle != "turns":
        return None
    one = nbytes / held(workload, ranks).in_flight
    count = workload.accumulation
    return [nbytes] * slots_per_step(count), count * one
