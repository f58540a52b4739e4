"""Rates of GPUs from published runs: shares of their data sheets, within what is possible.

A card has a share of its peak in matrix products; an architecture has one of the peak in attention
and one of the memory's rate; and all have in common what launches of kernels, exchanged bytes and
scale cost. The time of a token is linear in the inverse shares and in these three. Relative errors
are minimised, large ones counted less: some published runs are slower than their neighbours by a
quarter, without a reason that the tables give. What few rows tell stays close to what is usual.

Whole sources are left out and predicted by the fit to the others: their errors are the range that
plans print. A GPU has the rates of its own rows, or those of the GPU whose architecture is nearest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from math import inf
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simulation.emulated import Constant, bootstrap, not_negative
from simulation.files import Strict
from simulation.hardware import Gpu, Hardware, Rates, Work, card, scale
from simulation.measured import Row, Run, run_of
from simulation.prediction import predict
from simulation.workload import block_kernels, dequantised_bytes, token_work

#: Rounds in which weights are found, and the error below which all count alike.
_ROUNDS, _SMALL = 20, 0.02
#: Exchanges of all parameters per micro-batch: gathers of forward and backward, one reduction.
_EXCHANGES = 3
RECORD = Path(__file__).parents[1] / "results" / "compute" / "fit.json"


@dataclass(frozen=True)
class Usual:
    """A constant before any row was seen, and what it may be: ours, but for attention's."""

    value: float
    #: Rows of the fit that it counts as.
    rows: float
    #: Largest that is possible, of a share or of what is none.
    most: float
    share: bool = True


#: Attention of the second generation, forward and backward: the papers on FlashAttention-2 and 3.
_ATTENTION: Mapping[str, float] = {"a100": 0.6, "h100": 0.37}
#: Microseconds from a kernel to the next.
_LAUNCH = "kernel microseconds"
_PASSES, _LOST = "exchange passes", "lost with scale"
_COMMON: Mapping[str, Usual] = {
    _LAUNCH: Usual(4.0, 0.02, most=12.0, share=False),
    # Written and read by the exchange, copied into and out of its buffers.
    _PASSES: Usual(4.0, 0.0025, most=8.0, share=False),
    _LOST: Usual(0.15, 0.01, most=0.5, share=False),
}
#: Micro-batches of a step that are simulated; those of a row's step are alike.
_SIMULATED = 3
#: Shares of the known sources' errors between which nine of ten rows of one more are: a test leaves
#: each out in turn.
_ENDS = (0.025, 0.975)
#: Least share of the prediction that is thought possible of cards without a rack's power: they do
#: not hold the clocks of their data sheets in matrix products. Ours.
_LEAST_OF_CARDS = 0.55
#: Names of the checks that ranges are from.
SOURCES, ARCHITECTURES = "each source", "each architecture"


@dataclass(frozen=True)
class Fitted:
    """What was fitted: constants by name, such as ``h100-sxm products`` and ``h100 attention``."""

    constants: Mapping[str, float]

    @property
    def gpus(self) -> list[str]:
        """GPUs that had rows."""
        return [name.split()[0] for name in self.constants if name.endswith(" products")]

    def rates(self, device: Gpu, measured: str) -> Rates:
        """The rates of ``device`` by the shares of the GPU that was ``measured``."""
        products, attention, share = (self.constants[name] for name in _shares(measured))
        nbytes = share * device.memory_bytes_per_s
        passes = self.constants[_PASSES]
        return Rates(
            products_per_s=products * device.peak_flops,
            attention_per_s=attention * device.peak_flops,
            bytes_per_s=nbytes,
            copied_bytes_per_s=nbytes,
            exchanged_bytes_per_s=device.memory_bytes_per_s / passes if passes else inf,
            kernel_seconds=self.constants[_LAUNCH] / 1e6,
            lost_with_scale=self.constants[_LOST],
            basis="fitted" if measured == device.name else "nearest architecture",
            measured_on=measured,
        )


def architecture(gpu: str) -> str:
    """What cards of one architecture have in common in their names."""
    return gpu.split("-")[0]


def _shares(gpu: str) -> tuple[str, str, str]:
    """Names of the shares of a GPU."""
    kind = architecture(gpu)
    return f"{gpu} products", f"{kind} attention", f"{kind} bytes"


def _usual(name: str) -> Usual:
    of, _, part = name.partition(" ")
    if name in _COMMON:
        return _COMMON[name]
    if part == "products":
        return Usual(0.75, 0.25, most=0.95)
    if part == "attention":
        return Usual(_ATTENTION.get(of, 0.5), 4.0, most=0.8)
    return Usual(0.7, 0.04, most=0.92)


def fit(runs: Sequence[Run]) -> Fitted:
    """Fit the constants, each with its usual value for further rows.

    Raises ``ValueError`` where there are fewer runs than constants.
    """
    named = dict.fromkeys(name for run in runs for name in _shares(run.row.gpu))
    names = [*sorted(named, key=lambda name: (name.split()[1], name)), *_COMMON]
    if len(runs) < len(names):
        raise ValueError(
            f"rows: {len(runs)} were given, {len(names)} constants need as many at least"
        )
    features = np.array([[_features(run).get(name, 0.0) for name in names] for run in runs])
    target = np.array([1 - _optimizer_share(run) for run in runs])
    usual = [_usual(name) for name in names]
    inverse = np.array([1 / one.value if one.share else one.value for one in usual])
    least = np.array([1 / one.most if one.share else 0.0 for one in usual])
    rows = np.array([one.rows for one in usual]) ** 0.5
    # What is above its least possible value is what may not be negative.
    target = np.concatenate([target - features @ least, rows * (1 - least / inverse)])
    features = np.concatenate([features, np.diag(rows / inverse)])
    found = least + np.array(_robust(features, target, len(runs)))
    for at, one in enumerate(usual):
        if not one.share and found[at] > one.most:  # is what is possible, and the rest is fitted
            rest = np.delete(np.arange(len(names)), at)
            fixed = target - features[:, at] * one.most
            found[rest] = least[rest] + _robust(features[:, rest], fixed, len(runs))
            found[at] = one.most
    values = [1 / value if one.share else value for one, value in zip(usual, found, strict=True)]
    return Fitted(dict(zip(names, map(float, values), strict=True)))


def _features(run: Run) -> dict[str, float]:
    """Each constant's factor in the measured time, relative to it."""
    device, workload, row = run.hardware.device, run.workload, run.row
    work, tokens, layers = token_work(workload), workload.tokens, workload.model.layers
    measured = 1 / row.tokens_per_s_per_gpu
    products, attention, nbytes = _shares(row.gpu)
    passes = layers * (2 + workload.recomputed)
    alone = run.hardware.world_size == 1 or workload.schedule.shards == "rank"
    exchanged = 0 if alone else _EXCHANGES * workload.element_bytes * workload.parameters
    moved = work.nbytes + passes * dequantised_bytes(workload) / tokens
    found = {
        products: work.products / device.peak_flops,
        attention: work.attention / device.peak_flops,
        nbytes: moved / device.memory_bytes_per_s,
        _LAUNCH: 2e-6 * layers * block_kernels(workload) / tokens,
        _PASSES: exchanged / tokens / device.memory_bytes_per_s,
    }
    return {name: value / measured for name, value in found.items()} | {
        _LOST: scale(run.hardware.nodes)
    }


def _optimizer_share(run: Run) -> float:
    """Share of the measured time that the optimizer's step takes by the data sheet."""
    workload, world = run.workload, run.hardware.world_size
    seconds = (
        workload.adam_bytes * workload.trained / world / run.hardware.device.memory_bytes_per_s
    )
    tokens = workload.tokens * workload.accumulation
    return seconds / tokens * run.row.tokens_per_s_per_gpu


def _robust(features: NDArray[np.float64], target: NDArray[np.float64], rows: int) -> list[float]:
    """Fit with weights that fall with the error of the first ``rows``, the measured ones."""
    weights = np.ones(len(target))
    for _ in range(_ROUNDS):
        found = not_negative(features * weights[:, None], target * weights)
        errors = np.abs(features @ np.array(found) - target)[:rows]
        weights[:rows] = 1 / np.sqrt(np.maximum(errors, _SMALL))
    return found


class Check(Strict):
    """Relative errors of tokens per second, of rows that the fit had not seen, or of all."""

    what: str
    rows: int
    #: Median of the absolute errors, what nine of ten are within, and the largest.
    median: float
    nine_of_ten: float
    worst: float
    #: Ratios of measured to predicted between which nine of ten lie.
    lowest: float
    highest: float


class Predicted(Strict):
    """A row's measured and predicted tokens per second and GPU."""

    row: Row
    fitted: float
    #: By the fit to all other sources.
    held_out: float


class ComputeRecord(Strict):
    """All that was fitted, and how well it predicts."""

    evidence: Literal["simulated"] = "simulated"
    constants: list[Constant]
    checks: list[Check]
    predictions: list[Predicted]
    commit: str | None
    started_at: str

    def fitted(self) -> Fitted:
        """The constants as the fit has them."""
        return Fitted({constant.name: constant.value for constant in self.constants})

    def check(self, what: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.what == what)


def read(path: Path = RECORD) -> ComputeRecord:
    """Read the record. Raises ``ValueError`` for a file of another form."""
    return ComputeRecord.model_validate_json(path.read_bytes())


def settle(rows: Iterable[Row], commit: str | None) -> ComputeRecord:
    """Fit the bf16 rows, and check the fit; ``commit`` is the one that the record names."""
    runs = [run_of(row) for row in rows if row.bf16]
    whole = fit(runs)
    held_out = _left_out(runs, lambda run: run.row.source)
    kinds = _left_out(runs, lambda run: architecture(run.row.gpu))
    own = {id(run): tokens_per_gpu_s(run, whole) for run in runs}
    checks = [
        _check("all rows, fitted", runs, own),
        _check(SOURCES, runs, held_out),
        _check(ARCHITECTURES, runs, kinds),
    ]
    for source in dict.fromkeys(run.row.source for run in runs):
        checks.append(_check(source, [r for r in runs if r.row.source == source], held_out))
    return ComputeRecord(
        constants=_constants(runs, whole),
        checks=checks,
        predictions=[
            Predicted(row=run.row, fitted=own[id(run)], held_out=held_out[id(run)]) for run in runs
        ],
        commit=commit,
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def errors(rows: Iterable[Row], found: Fitted) -> Check:
    """How well the constants predict the rows in bf16. Raises ``ValueError`` where none is."""
    runs = [run_of(row) for row in rows if row.bf16]
    if not runs:
        raise ValueError("rows: hold none in bf16")
    return _check("given rows", runs, {id(run): tokens_per_gpu_s(run, found) for run in runs})


def tokens_per_gpu_s(run: Run, found: Fitted) -> float:
    """Tokens per second and GPU as the simulator predicts them."""
    known = found.gpus
    kind = architecture(run.row.gpu)
    alike = (gpu for gpu in known if architecture(gpu) == kind)
    nearest = (run.row.gpu, card(run.row.gpu).like, *alike, *known)
    measured_on = next(gpu for gpu in nearest if gpu in known)
    rates = found.rates(run.hardware.device, measured_on)
    hardware = replace(run.hardware, rates=rates)
    count = min(_SIMULATED, run.workload.accumulation)
    return predict(replace(run.workload, accumulation=count), hardware).tokens_per_s / run.row.gpus


def _left_out(runs: Sequence[Run], group: Callable[[Run], str]) -> dict[int, float]:
    """Each run's prediction by the fit to the runs of all other groups."""
    found = {}
    for name in dict.fromkeys(group(run) for run in runs):
        others = fit([run for run in runs if group(run) != name])
        for run in runs:
            if group(run) == name:
                found[id(run)] = tokens_per_gpu_s(run, others)
    return found


def _check(what: str, runs: Sequence[Run], predicted: Mapping[int, float]) -> Check:
    measured = {id(run): run.row.tokens_per_s_per_gpu for run in runs}
    ratios = [measured[key] / predicted[key] for key in measured]
    absolute = [abs(1 / ratio - 1) for ratio in ratios]
    lowest, highest = spread(
        [(run.row.source, measured[id(run)] / predicted[id(run)]) for run in runs]
    )
    return Check(
        what=what,
        rows=len(runs),
        median=round(median(absolute), 4),
        nine_of_ten=round(float(np.quantile(absolute, 0.9)), 4),
        worst=round(max(absolute), 4),
        lowest=round(float(lowest), 4),
        highest=round(float(highest), 4),
    )


def spread(ratios: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Where nine of ten ratios of a further source lie, by ratios with their sources, all alike."""
    count = Counter(source for source, _ in ratios)
    ordered = sorted((ratio, 1 / count[source]) for source, ratio in ratios)
    reached = np.cumsum([weight for _, weight in ordered]) / len(count)
    low, high = (ordered[int(np.searchsorted(reached, end - 1e-9))][0] for end in _ENDS)
    return low, high


def _constants(runs: Sequence[Run], whole: Fitted) -> list[Constant]:
    """The constants with intervals; a draw that lacks a GPU, or cannot be fitted, is left out."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row.gpu, run.row.model), []).append(run)
    names = list(whole.constants)

    def solve(drawn: list[Run]) -> list[float] | None:
        try:
            numbers = fit(drawn).constants
        except ValueError:
            return None
        return [numbers[name] for name in names] if {*numbers} == {*names} else None

    lows, highs = bootstrap(list(groups.values()), solve)
    found = []
    for name, *numbers in zip(names, whole.constants.values(), lows, highs, strict=True):
        value, low, high = (float(f"{number:.4g}") for number in numbers)
        found.append(Constant(name=name, value=value, low=low, high=high))
    return found


@cache
def record() -> ComputeRecord:
    """The committed fit."""
    return read()


def rates_of(device: Gpu) -> Rates:
    """The rates of the GPU, with their range and what they rest on; raises as ``card``."""
    known = record()
    rates = known.fitted().rates(device, card(device.name).like)
    if rates.basis == "fitted":
        check = known.check(SOURCES)
        return replace(rates, lowest=check.lowest, highest=check.highest)
    check = known.check(ARCHITECTURES)
    lowest = min(check.lowest, _LEAST_OF_CARDS) if device.link_is_pcie else check.lowest
    return replace(rates, lowest=lowest, highest=check.highest)


def by_block(device: Gpu, work: Work, seconds: float) -> Rates:
    """The GPU's rates where one transformer block, of this work, was measured.

    All parts are as much faster or slower than fitted; what is left to err is what runs of sizes
    that the fit had not seen do.
    """
    check = record().check(SOURCES)
    return replace(
        rates_of(device).with_block(work, seconds), lowest=check.lowest, highest=check.highest
    )


def with_rates(hardware: Hardware) -> Hardware:
    """The cluster whose GPUs compute at fitted rates."""
    return replace(hardware, rates=rates_of(hardware.device))
