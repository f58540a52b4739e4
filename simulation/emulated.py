"""The emulated clusters that the committed records were measured on: one host of two cores.

All ranks share its cores: for computing, for the kernel's work on what they send, and for Python.
The constants are fitted to unshaped records, which see no limit but these; links that are shaped
are then predicted, and predicted steps stand beside measured ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simulation import framing
from simulation.files import Strict
from simulation.hardware import GB, Gpu, Hardware, Overheads, share_of_peak
from simulation.prediction import Prediction, build, predict
from simulation.workload import Workload

#: TCP's headers and acknowledgements over frames of 9000 bytes take the rest, by the counters.
PAYLOAD_SHARE = 0.988
#: Bytes per second of copies in memory, all cores together.
_COPY_BYTES_PER_S = 10 * GB
#: Constants that all engines have in common; times of operations are found in place of rates.
_SHARED = ("message_seconds", "byte_seconds", "gathered_byte_seconds", "activation_byte_seconds")
#: Draws of the bootstrap. Its units err alike: a model's steps under one strategy, a GPU's rows of
#: one size.
_DRAWS, _SEED = 200, 7
INTERVAL = (0.05, 0.95)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Constants(Overheads):
    """What one host takes for computing and sending, all cores together."""

    #: Operations per second of matrix products in fp32.
    flops: float


_NOTHING = Constants(flops=float("inf"))
#: Matrices whose cells without a limit on their links the constants are fitted to.
FITTED_TO = ("unshaped", "reference", "slow-link", "parity")
#: Intel Xeon at 2.5 GHz, two cores, torch 2.13, gloo; fp32.
TWO_CORES = Constants(
    flops=306.20e9,
    block_seconds={"deepspeed": 0.03437, "fcdp": 0.02396, "fsdp2": 0.01671, "ddp": 0.00152},
    step_seconds={"deepspeed": 0.04181, "fcdp": 0.00150, "fsdp2": 0.00770, "ddp": 0.00644},
    message_seconds=0.6584e-3,
    byte_seconds=0.2913e-9,
    gathered_byte_seconds=0.3347e-9,
    activation_byte_seconds=1.0684e-9,
)


def emulated(
    nodes: int,
    ranks_per_node: int,
    inter_bits_per_s: float | None,
    constants: Constants = TWO_CORES,
    memory_bytes: float = 25 * GB,
) -> Hardware:
    """A cluster whose nodes are namespaces of one host.

    ``inter_bits_per_s`` limits what each node sends, ``None``: nothing does; ``memory_bytes`` is a
    node's memory.
    """
    host = Gpu(
        "emulated",
        peak_flops=constants.flops,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=_COPY_BYTES_PER_S,
        pcie_bytes_per_s=_COPY_BYTES_PER_S,
        link_bytes_per_s=_COPY_BYTES_PER_S,
    )
    cluster = Hardware(
        name=f"{nodes}x{ranks_per_node}-emulated",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=host,
        rates=share_of_peak(host, 1.0, nodes * ranks_per_node),
        inter_bytes_per_s=float("inf"),
        intra_bytes_per_s=float("inf"),
        # A message's latency is part of what the host's cores do: see ``message_seconds``.
        inter_latency_seconds=0.0,
        intra_latency_seconds=0.0,
        host_to_device_bytes_per_s=_COPY_BYTES_PER_S,
        device_to_host_bytes_per_s=_COPY_BYTES_PER_S,
        nic_shares_pcie=False,
        host_memory_bytes=memory_bytes,
        device_reserve_bytes=0.0,
        backend="gloo",
        ranks_sharing_device=nodes * ranks_per_node,
        overheads=Overheads(
            **{one.name: getattr(constants, one.name) for one in fields(Overheads)}
        ),
    )
    if inter_bits_per_s is None:
        return cluster
    return cluster.with_inter_bandwidth(PAYLOAD_SHARE * inter_bits_per_s)


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


def communication_to_computation(workload: Workload, hardware: Hardware) -> float:
    """Seconds that a node's link is busy per second of a rank's computation."""
    prediction = predict(workload, hardware)
    seconds = prediction.inter_node_bytes / hardware.inter_bytes_per_s
    return seconds / _computation_seconds(prediction)


def link_bits_per_s(ratio: float, workload: Workload, unlimited: Hardware) -> float:
    """The limit of an emulated link, in bits per second, at which the workload has this ratio.

    ``unlimited`` is the emulated cluster without a limit.
    """
    prediction = predict(workload, unlimited)
    seconds = ratio * _computation_seconds(prediction)
    return 8 * prediction.inter_node_bytes / seconds / PAYLOAD_SHARE


def _computation_seconds(prediction: Prediction) -> float:
    return prediction.timeline.busy_seconds()["compute"]
