"""One host's constants, fitted to steps that ran on it; predicted steps beside measured ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simulation import framing
from simulation.emulated import Constants, emulated
from simulation.files import Strict
from simulation.hardware import Hardware
from simulation.prediction import Prediction, build, predict
from simulation.workload import Workload

_NOTHING = Constants(flops=float("inf"))
#: Constants that all engines have in common; times of operations are found in place of rates.
_SHARED = ("message_seconds", "byte_seconds", "gathered_byte_seconds", "activation_byte_seconds")
#: Draws of the bootstrap. Its units err alike: a model's steps under one strategy, a GPU's rows of
#: one size.
_DRAWS, _SEED = 200, 7
INTERVAL = (0.05, 0.95)

_T = TypeVar("_T")


@dataclass(frozen=True)
class MeasuredStep:
    """A step that ran on a cluster, with its time and bytes."""

    workload: Workload
    hardware: Hardware
    seconds: float
    #: Bytes that one node sent to others.
    inter_node_bytes: float


class Constant(Strict):
    """A constant, and where it lies in nine of ten draws of the bootstrap."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class _Fit:
    """Steps as least squares see them: each constant's share of the measured time."""

    names: tuple[str, ...]
    features: NDArray[np.float64]
    target: NDArray[np.float64]

    def solve(self, rows: Sequence[int]) -> list[float]:
        return not_negative(self.features[rows], self.target[rows])


def calibrate(steps: Sequence[MeasuredStep]) -> Constants:
    """Fit a host's constants: least squares of the relative errors of times, none below zero.

    A step without a limit on its links takes what the host's cores take, which is linear in the
    constants. Raises ``ValueError`` if there are fewer steps without a limit than constants.
    """
    free = _without_limit(steps)
    fit = _fit(free)
    found = dict(zip(fit.names, fit.solve(range(len(free))), strict=True))
    engines = _engines(free)
    return Constants(
        flops=1 / found["flops"] if found["flops"] else float("inf"),
        block_seconds={engine: found[f"{engine} block"] for engine in engines},
        step_seconds={engine: found[f"{engine} step"] for engine in engines},
        **{name: found[name] for name in _SHARED},
    )


def intervals(steps: Sequence[MeasuredStep]) -> list[Constant]:
    """The constants of ``calibrate``, in seconds, with what a bootstrap makes of each.

    That of ``flops`` is a rate. A draw that lacks an engine is left out.
    """
    free = _without_limit(steps)
    fit = _fit(free)
    groups: dict[tuple[str, str], list[int]] = {}
    for at, step in enumerate(free):
        groups.setdefault((step.workload.model.name, step.workload.strategy), []).append(at)

    def solve(rows: list[int]) -> list[float] | None:
        complete = _engines([free[at] for at in rows]) == _engines(free)
        return fit.solve(rows) if complete else None

    low, high = bootstrap(list(groups.values()), solve)
    found = []
    for name, value, least, most in zip(
        fit.names, fit.solve(range(len(free))), low, high, strict=True
    ):
        if name == "flops":
            value, least, most = (1 / one if one else math.inf for one in (value, most, least))
        found.append(Constant(name=name, value=value, low=float(least), high=float(most)))
    return found


def bootstrap(
    groups: Sequence[Sequence[_T]], solve: Callable[[list[_T]], Sequence[float] | None]
) -> NDArray[np.float64]:
    """Where each number begins and ends in nine of ten draws, whose units are whole groups.

    A draw that ``solve`` has no numbers for is left out.
    """
    draw = np.random.default_rng(_SEED)
    drawn = []
    for _ in range(_DRAWS):
        chosen = draw.integers(len(groups), size=len(groups))
        if (found := solve([one for index in chosen for one in groups[index]])) is not None:
            drawn.append(found)
    ends: NDArray[np.float64] = np.quantile(np.array(drawn), INTERVAL, axis=0)
    return ends


def _without_limit(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Those that took what the host's cores did, and no link or server."""
    return [
        step
        for step in steps
        if math.isinf(step.hardware.inter_bytes_per_s) and not step.workload.served
    ]


def _engines(steps: Sequence[MeasuredStep]) -> list[str]:
    return sorted({step.workload.engine for step in steps})


def _fit(free: Sequence[MeasuredStep]) -> _Fit:
    units = _single_costs(_engines(free))
    if len(free) < len(units):
        raise ValueError(
            f"records: hold {len(free)} cells without a limit that ran, "
            f"{len(units)} constants need as many at least"
        )
    measured = np.array([step.seconds for step in free])
    rest = np.array([_busy(step, _NOTHING) for step in free])
    columns = [[_busy(step, constants) for step in free] for constants in units.values()]
    features = (np.array(columns).T - rest[:, None]) / measured[:, None]
    return _Fit(tuple(units), features, 1 - rest / measured)


def _single_costs(engines: Sequence[str]) -> Mapping[str, Constants]:
    """Hosts on each of which only one thing takes time, by the name of the constant."""
    return {
        "flops": replace(_NOTHING, flops=1.0),
        "message_seconds": replace(_NOTHING, message_seconds=1.0),
        "byte_seconds": replace(_NOTHING, byte_seconds=1.0),
        "gathered_byte_seconds": replace(_NOTHING, gathered_byte_seconds=1.0),
        "activation_byte_seconds": replace(_NOTHING, activation_byte_seconds=1.0),
        **{f"{name} block": replace(_NOTHING, block_seconds={name: 1.0}) for name in engines},
        **{f"{name} step": replace(_NOTHING, step_seconds={name: 1.0}) for name in engines},
    }


def _busy(step: MeasuredStep, constants: Constants) -> float:
    """Seconds per step that the host's cores are in full use."""
    hardware = emulated(step.hardware.nodes, step.hardware.ranks_per_node, None, constants)
    tasks = build(step.workload, hardware).tasks.tasks
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


@dataclass(frozen=True)
class Comparison:
    """A step that was run, and its prediction."""

    measured: MeasuredStep
    prediction: Prediction

    @property
    def relative_error(self) -> float:
        """Relative error of the predicted time; above 0 where the prediction is too slow."""
        return self.prediction.step_seconds / self.measured.seconds - 1

    @property
    def bytes_agree(self) -> bool:
        """Whether the bytes differ by no more than protocol overhead."""
        step = self.measured
        return framing.agree(
            step.workload,
            step.hardware.nodes,
            step.hardware.ranks_per_node,
            predicted=self.prediction.inter_node_bytes,
            counted=step.inter_node_bytes,
        )

    @property
    def counted_share(self) -> float:
        """Ratio of counted to predicted bytes; 1 where nothing crosses, as on one node."""
        if not self.prediction.inter_node_bytes:
            return math.inf if self.measured.inter_node_bytes else 1.0
        return self.measured.inter_node_bytes / self.prediction.inter_node_bytes


def compare(step: MeasuredStep) -> Comparison:
    """Simulate the step on the cluster that it ran on."""
    return Comparison(step, predict(step.workload, step.hardware))


def median_absolute_error(comparisons: Sequence[Comparison]) -> float:
    """Median error of the steps' times, as a share.

    Raises ``ValueError`` where nothing was compared.
    """
    if not comparisons:
        raise ValueError("comparisons = []: must hold at least one cell that ran")
    return median(abs(comparison.relative_error) for comparison in comparisons)
