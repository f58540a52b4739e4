"""The optimizer's part of a step: where the states are, and what it takes to reach them."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.schedule import Schedule
from simulation import traffic as collectives
from simulation.step.tasks import COMPUTE, Tasks
from simulation.units import Layout
from simulation.workload import Workload

#: Bytes per element of AdamW in fp32: it reads parameter, gradient and two moments, and writes all
#: but the gradient.
ADAM_BYTES = 28
_STATES_BYTES = 12


def optimizer_tasks(
    tasks: Tasks, workload: Workload, schedule: Schedule, units: Layout, ends: Sequence[int]
) -> None:
    """Append the optimizer's step, which begins when all gradients are reduced."""
    hardware = tasks.hardware
    sharers = {
        "world": hardware.world_size,
        "node": hardware.ranks_per_node,
        "rank": 1,
    }[schedule.shards]
    mine = workload.trained / sharers
    if schedule.optimizer == "device":
        rate = hardware.device.memory_bytes_per_s / hardware.ranks_sharing_device
        at = tasks.compute("optimizer", ADAM_BYTES * mine / rate, ends)
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
