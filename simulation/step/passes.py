"""Seconds of a pass and of the optimizer: what a block takes beside products, what states take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baselines.schedule import Schedule
from simulation import traffic as collectives
from simulation.cycle import Stages
from simulation.hardware import Hardware
from simulation.step.tasks import COMPUTE, Tasks
from simulation.traffic import Traffic
from simulation.units import Layout
from simulation.workload import (
    Workload,
    block_bytes,
    block_work,
    dequantised_bytes,
    head_work,
    recomputed_work,
)

#: Bytes per element of AdamW in fp32: it reads parameter, gradient and two moments, and writes all
#: but the gradient.
ADAM_BYTES = 28
_STATES_BYTES = 12
#: Per element of a worker at the end of a round, in fp32: the displacement takes what is trained
#: and what the round began with (three passes), the momentum takes the mean (three), what the round
#: began with takes the momentum (three), and what is trained takes that (two).
_ROUND_BYTES = 11 * 4


def overhead_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds beside matrix products, in one forward or one backward of a block."""
    overheads = hardware.overheads
    kept = workload.tokens * block_bytes(workload) * hardware.ranks_sharing_device
    each = overheads.block_seconds.get(workload.engine, 0.0)
    return (each + overheads.activation_byte_seconds * kept) / 2


def call_seconds(workload: Workload, hardware: Hardware) -> float:
    """Seconds of calls for a block in the optimizer's step."""
    return hardware.overheads.step_seconds.get(workload.engine, 0.0)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds that a rank computes for each stage of a cycle, in one micro-batch; its update."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update: tuple[float, ...]

    @classmethod
    def of(cls, workload: Workload, stages: Stages, hardware: Hardware) -> StageSeconds:
        """Those of a workload on ranks of this hardware; the last stage has the head."""
        tokens, again = workload.tokens, workload.recomputed
        forward, backward = block_work(workload)
        backward += recomputed_work(workload) * again
        head = [hardware.seconds(work * tokens) for work in head_work(workload)]
        beside = overhead_seconds(workload, hardware)
        each_pass = dequantised_bytes(workload) / hardware.rates.copied_bytes_per_s
        one = hardware.seconds(forward * tokens) + beside + each_pass
        back = hardware.seconds(backward * tokens) + beside + (1 + again) * each_pass
        last = len(stages) - 1
        return cls(
            tuple(n * one + head[0] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(n * back + head[1] * (at == last) for at, n in enumerate(stages.blocks)),
            tuple(
                adam_seconds(numel, hardware) + n * call_seconds(workload, hardware)
                for numel, n in zip(stages.trained, stages.blocks, strict=True)
            ),
        )


def adam_seconds(elements: float, hardware: Hardware) -> float:
    """Seconds in which a rank's device steps so many parameters."""
    return ADAM_BYTES * elements / _rate(hardware)


def optimizer_tasks(
    tasks: Tasks, workload: Workload, schedule: Schedule, units: Layout, ends: Sequence[int]
) -> None:
    """Append the optimizer's step, which begins when all gradients are reduced."""
    hardware = tasks.hardware
    mine = workload.trained / schedule.sharers(hardware.nodes, hardware.ranks_per_node)
    if schedule.optimizer == "device":
        at = tasks.compute("optimizer", adam_seconds(mine, hardware), ends)
    else:
        of_node = mine * hardware.ranks_per_node
        demands = {"cpu": of_node / hardware.cpu_adam_elements_per_s}
        if schedule.optimizer == "disk":  # read, step and write follow one another as a pipeline
            nbytes = _STATES_BYTES * of_node
            rates = hardware.disk_read_bytes_per_s, hardware.disk_write_bytes_per_s
            demands["disk"] = sum(nbytes / rate for rate in rates)
            tasks.count("disk", "optimizer", 2 * nbytes)
        at = tasks.add("optimizer", "cpu", demands, ends)
        if schedule.parameters == "device":
            size = workload.element_bytes * mine
            at = tasks.copy(
                "updated parameters", "host_to_device", "copy in", size, "optimizer", (at,)
            )
    if units.replicated and schedule.replicates_small:
        # DeepSpeed steps what it replicates in shards, and gathers it again.
        nbytes = float(workload.element_bytes * units.replicated)
        if schedule.shards == "node" or hardware.nodes == 1:
            traffic = collectives.intra_node(nbytes, hardware.ranks_per_node)
        else:
            traffic = collectives.flat(nbytes, hardware.nodes, hardware.ranks_per_node)
        tasks.exchange("gather what stays whole", COMPUTE, traffic, "optimizer", (at,))


def round_tasks(tasks: Tasks, workload: Workload, schedule: Schedule, average: Traffic) -> None:
    """Append a step's share of a round's mean: all wait for it, or it arrives meanwhile.

    Comes after the optimizer's tasks.
    """
    hardware, stepped = tasks.hardware, len(tasks.tasks) - 1
    late = schedule.averages == "late"
    arrived = tasks.exchange("average", "average", average, "reduce", () if late else (stepped,))
    if workload.outer_on == "device":
        sharers = schedule.sharers(hardware.nodes, hardware.ranks_per_node)
        seconds = _ROUND_BYTES * workload.trained / sharers / _rate(hardware) / workload.interval
        tasks.compute("outer update", seconds, (stepped if late else arrived,))


def _rate(hardware: Hardware) -> float:
    """Bytes per second of a rank's device memory."""
    return hardware.device.memory_bytes_per_s / hardware.ranks_sharing_device
