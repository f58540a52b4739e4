"""The share of the time that trains: the rest saves checkpoints, is lost to failures, or restarts.

Failures come independently of one another, so many nodes fail as often as their rates' sum. What is
lost to waiting for the slowest of many nodes is in the fitted rates of computation already
(``lost_with_scale``), from 8 to 512 GPUs.
"""

import math

from simulation.hardware import Hardware
from simulation.workload import STATE_BYTES, Workload

#: GPU-hours per unexpected interruption: 419 in 54 days on 16,384 GPUs (the Llama 3 report).
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
#: Hours until the cloud reclaims a spot instance, in the mean: ours; it differs by type and week.
SPOT_HOURS = 12.0
#: Seconds until a job runs again on new nodes: ours.
RESTART_SECONDS = 300.0
#: An interval longer than so many mean times between failures is never completed.
_NEVER = 100


def goodput(save_seconds: float, mean_seconds: float, restart_seconds: float) -> float:
    """Share of the time that trains, with checkpoints as often as is best (Young; Daly 2006).

    ``mean_seconds`` are those between two failures.
    """
    # Young's interval; none is shorter than a save, as where failures are frequent it would be.
    interval = max(math.sqrt(2 * save_seconds * mean_seconds) - save_seconds, save_seconds, 1.0)
    to_save, to_restart = (interval + save_seconds) / mean_seconds, restart_seconds / mean_seconds
    if to_save + to_restart > _NEVER:
        return 0.0
    lost = math.exp(to_restart) * math.expm1(to_save)
    return interval / (mean_seconds * lost)


def of(workload: Workload, hardware: Hardware, *, spot: bool) -> float:
    """Goodput of the workload on nodes that fail, and that a cloud may reclaim."""
    per_hour = hardware.world_size / GPU_HOURS_PER_FAILURE
    if spot:
        per_hour += hardware.nodes / SPOT_HOURS
    # A checkpoint to the nodes' disks: what is trained, and its moments, in fp32.
    nbytes = STATE_BYTES * workload.trained
    save_seconds = nbytes / (hardware.nodes * hardware.disk_write_bytes_per_s)
    return goodput(save_seconds, 3600 / per_hour, RESTART_SECONDS)
