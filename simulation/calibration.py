"""The constants of one host, fitted to steps that ran on it without a limit between nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simulation.emulated import Constants, emulated
from simulation.hardware import Hardware
from simulation.step.placement import place
from simulation.step.schedule import Step
from simulation.units import layout
from simulation.workload import Workload

_NOTHING = Constants(float("inf"), {}, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran on a cluster, with its time and bytes."""

    workload: Workload
    hardware: Hardware
    seconds: float
    #: Bytes that one node sent to others.
    inter_node_bytes: float


def calibrate(steps: Sequence[MeasuredStep]) -> Constants:
    """Fit a host's constants: least squares of the relative errors of times, none below zero.

    A step without a limit on its links takes what the host's cores take, which is linear in the
    constants. Raises ``ValueError`` if there are fewer steps without a limit than constants.
    """
    free = [step for step in steps if math.isinf(step.hardware.inter_bytes_per_s)]
    engines = sorted({step.workload.engine for step in free})
    units = _single_costs(engines)
    if len(free) < len(units):
        raise ValueError(
            f"records: hold {len(free)} cells without a limit that ran, "
            f"{len(units)} constants need as many at least"
        )
    measured = np.array([step.seconds for step in free])
    rest = np.array([_busy(step, _NOTHING) for step in free])
    columns = [[_busy(step, constants) for step in free] for constants in units.values()]
    features = (np.array(columns).T - rest[:, None]) / measured[:, None]
    found = dict(zip(units, not_negative(features, 1 - rest / measured), strict=True))
    return Constants(
        flops=1 / found["flops"] if found["flops"] else float("inf"),
        block_seconds={engine: found[engine] for engine in engines},
        byte_seconds=found["byte_seconds"],
        gathered_byte_seconds=found["gathered_byte_seconds"],
        activation_byte_seconds=found["activation_byte_seconds"],
    )


def _single_costs(engines: Sequence[str]) -> Mapping[str, Constants]:
    """Hosts on each of which only one thing takes time, by the name of the constant."""
    return {
        "flops": replace(_NOTHING, flops=1.0),
        "byte_seconds": replace(_NOTHING, byte_seconds=1.0),
        "gathered_byte_seconds": replace(_NOTHING, gathered_byte_seconds=1.0),
        "activation_byte_seconds": replace(_NOTHING, activation_byte_seconds=1.0),
        **{engine: replace(_NOTHING, block_seconds={engine: 1.0}) for engine in engines},
    }


def _busy(step: MeasuredStep, constants: Constants) -> float:
    """Seconds per step that the host's cores are in full use."""
    workload = step.workload
    hardware = emulated(step.hardware.nodes, step.hardware.ranks_per_node, None, constants)
    schedule = workload.schedule
    units = layout(workload, schedule, hardware.nodes, hardware.ranks_per_node)
    placement = place(workload, schedule, units, hardware)
    tasks = Step(workload, schedule, units, placement, hardware).build().tasks
    return sum(task.demands.get("compute", 0.0) for task in tasks)


def not_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Fit by least squares; what would be negative is nought, and the rest is fitted again."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1
    kept = np.arange(features.shape[1])
    while True:
        solution, *_ = np.linalg.lstsq(features[:, kept] / scale[kept], target, rcond=None)
        if (solution >= 0).all():
            break
        kept = kept[solution >= 0]
    found = np.zeros(features.shape[1])
    found[kept] = solution / scale[kept]
    return [float(value) for value in found]
