"""A cycle of micro-batches on one rank, which take turns: all that a step has, slot by slot.

As ``baselines.cyclic.interleaved`` does it: in a slot each micro-batch that is under way goes
through one stage, forwards first. Steps overlap, so that a steady step has as many slots as there
are from its first micro-batch's start to that of the next step's, and all that happens in these.
"""

from __future__ import annotations

from baselines.cyclic.rule import slots_per_step
from simulation import traffic
from simulation.cycle import stages_of
from simulation.hardware import Hardware
from simulation.step.passes import StageSeconds
from simulation.step.tasks import COMPUTE, Tasks
from simulation.workload import Workload

#: A stage's new version is a copy that is stepped: read and written once.
_COPY_BYTES = 8
_FP32 = 4


def in_slot(slot: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """The micro-batches that are under way in a steady step's slot, each with its phase.

    A phase below ``stages`` is that stage's forward; of the others the first is the last stage's
    backward.
    """
    period = slots_per_step(micro_batches)
    phases = [(one, (slot - 2 * one) % period) for one in range(micro_batches)]
    return [(one, phase) for one, phase in phases if phase < 2 * stages]


def turns(workload: Workload, hardware: Hardware) -> Tasks:
    """The tasks of one steady step. Raises ``ValueError`` as ``stages_of``."""
    stages, tasks = stages_of(workload, hardware.world_size), Tasks(hardware)
    seconds = StageSeconds.of(workload, stages, hardware)
    count, micro_batches = len(stages), workload.accumulation
    for slot in range(slots_per_step(micro_batches)):
        there = in_slot(slot, count, micro_batches)
        forward = sum(seconds.forward[phase] for _, phase in there if phase < count)
        tasks.compute(f"forward slot {slot}", forward, ())
        for one, phase in there:
            if phase < count:
                continue
            stage = 2 * count - 1 - phase
            title = f"backward slot {slot} micro-batch {one}"
            tasks.compute(title, seconds.backward[stage], ())
            if one == micro_batches - 1:
                _update(tasks, stage, stages.trained[stage], seconds.update[stage])
    return tasks


def _update(tasks: Tasks, stage: int, trained: int, seconds: float) -> None:
    """Append what follows a stage's last gradients: their sum over ranks, and a new version."""
    hardware = tasks.hardware
    if hardware.world_size > 1 and trained:
        nbytes = float(_FP32 * trained)
        ring = traffic.flat_all_reduce(nbytes, hardware.nodes, hardware.ranks_per_node)
        name = f"reduce stage {stage}"
        tasks.exchange(name, COMPUTE, ring, "reduce", (), reduced_bytes=nbytes)
    copy = hardware.memory_seconds(_COPY_BYTES * trained)
    tasks.compute(f"optimizer stage {stage}", seconds + copy, ())
