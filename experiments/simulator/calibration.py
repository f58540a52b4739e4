"""The constants of one host, fitted to cells that were run on it without a limit between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from experiments.costs.emulated import Constants, emulated
from experiments.costs.strategies import scheme
from experiments.costs.units import layout
from experiments.costs.workload import Workload
from experiments.records import Record
from experiments.simulator.placement import place
from experiments.simulator.step import Step

_NOTHING = Constants(float("inf"), {}, 0.0, 0.0, 0.0)


def calibrate(records: Sequence[Record]) -> Constants:
    """Least squares of the relative errors of the steps' times, no constant below zero.

    A step without a limit on its links takes what the host's cores take, which is linear in the
    constants. Raises ``ValueError`` if there are fewer cells without a limit than constants.
    """
    cells = [
        (Workload.of(record.cell), record, seconds)
        for record in records
        if (seconds := record.step_seconds_median) is not None
        and record.cell.inter_bandwidth_bits_per_s is None
    ]
    engines = sorted({scheme(workload.strategy).engine for workload, _, _ in cells})
    units = _unit_constants(engines)
    if len(cells) < len(units):
        raise ValueError(
            f"records: hold {len(cells)} cells without a limit that ran, "
            f"{len(units)} constants need as many at least"
        )
    measured = np.array([seconds for _, _, seconds in cells])
    rest = np.array([_busy(workload, record, _NOTHING) for workload, record, _ in cells])
    columns = [
        [_busy(workload, record, constants) for workload, record, _ in cells]
        for constants in units.values()
    ]
    features = (np.array(columns).T - rest[:, None]) / measured[:, None]
    found = dict(zip(units, _not_negative(features, 1 - rest / measured), strict=True))
    return Constants(
        flops=1 / found["flops"] if found["flops"] else float("inf"),
        block_seconds={engine: found[engine] for engine in engines},
        byte_seconds=found["byte_seconds"],
        gathered_byte_seconds=found["gathered_byte_seconds"],
        activation_byte_seconds=found["activation_byte_seconds"],
    )


def _unit_constants(engines: Sequence[str]) -> Mapping[str, Constants]:
    """A host on which only one thing takes time, by the name of the constant."""
    return {
        "flops": replace(_NOTHING, flops=1.0),
        "byte_seconds": replace(_NOTHING, byte_seconds=1.0),
        "gathered_byte_seconds": replace(_NOTHING, gathered_byte_seconds=1.0),
        "activation_byte_seconds": replace(_NOTHING, activation_byte_seconds=1.0),
        **{engine: replace(_NOTHING, block_seconds={engine: 1.0}) for engine in engines},
    }


def _busy(workload: Workload, record: Record, constants: Constants) -> float:
    """Seconds that the host's cores are in full use."""
    cluster = record.cell.cluster
    hardware = emulated(cluster.nodes, cluster.ranks_per_node, None, constants)
    plan = scheme(workload.strategy)
    units = layout(workload, plan, hardware.nodes, hardware.ranks_per_node)
    placement = place(workload, plan, units, hardware)
    tasks = Step(workload, plan, units, placement, hardware).build().tasks
    return sum(task.demands.get("compute", 0.0) for task in tasks)


def _not_negative(features: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    """Least squares; what would be negative is nought, and the rest is fitted again."""
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
