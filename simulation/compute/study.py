"""The fit's record, and the rates of any GPU by it.

The record has constants with intervals, errors on rows that were left out, and predictions. A GPU
has the rates of its own rows, or those of the GPU whose architecture is nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from simulation.calibration import INTERVAL, Constant, bootstrap
from simulation.compute.fit import Fitted, Row, Run, Shares, fit, run_of
from simulation.files import Strict
from simulation.hardware import Gpu, Hardware, Rates, Work, card
from simulation.prediction import predict

RECORD = Path(__file__).parents[2] / "results" / "compute" / "fit.json"
SOURCE = "mosaicml/llm-foundry, scripts/train/benchmarking"
#: Sizes of the half that is fitted where the other half is predicted, and the other way round.
HALF = frozenset({"70b", "3b", "760m", "125m"})
#: Micro-batches of a step that are simulated; those of a row's step are alike.
_SIMULATED = 3
#: Least share of the prediction that is thought possible of cards without a rack's power: they do
#: not hold the clocks of their data sheets in matrix products. Ours.
_LEAST_OF_CARDS = 0.55


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
    #: By the fit to the half that does not have the row's size.
    held_out: float


class ComputeRecord(Strict):
    """All that was fitted, and how well it predicts."""

    evidence: Literal["simulated"] = "simulated"
    source: str = SOURCE
    constants: list[Constant]
    checks: list[Check]
    predictions: list[Predicted]
    commit: str | None
    started_at: str

    def fitted(self) -> Fitted:
        """The constants as the fit has them."""
        values = {constant.name: constant.value for constant in self.constants}
        passes, lost = values.pop("exchange passes"), values.pop("lost with scale")
        by_gpu: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            gpu, part = name.split()
            by_gpu.setdefault(gpu, {})[part] = value
        shares = {gpu: Shares(**parts) for gpu, parts in by_gpu.items()}
        return Fitted(shares, passes, lost)

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
    halves = _left_out(runs, lambda run: str(run.row.model in HALF))
    own = {id(run): tokens_per_gpu_s(run, whole) for run in runs}
    checks = [
        _check("all rows, fitted", runs, own),
        _check("the other half of the sizes", runs, halves),
        _check("each size", runs, _left_out(runs, lambda run: run.row.model)),
        _check("each length", runs, _left_out(runs, lambda run: str(run.row.sequence_length))),
        _check("each GPU", runs, _left_out(runs, lambda run: run.row.gpu)),
        _check("each architecture", runs, _left_out(runs, lambda run: run.row.gpu.split("-")[0])),
    ]
    return ComputeRecord(
        constants=_constants(runs, whole),
        checks=checks,
        predictions=[
            Predicted(row=run.row, fitted=own[id(run)], held_out=halves[id(run)]) for run in runs
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
    measured_on = run.row.gpu if run.row.gpu in found.shares else min(found.shares)
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
    lowest, highest = np.quantile(ratios, INTERVAL)
    return Check(
        what=what,
        rows=len(runs),
        median=round(median(absolute), 4),
        nine_of_ten=round(float(np.quantile(absolute, 0.9)), 4),
        worst=round(max(absolute), 4),
        lowest=round(float(lowest), 4),
        highest=round(float(highest), 4),
    )


def _constants(runs: Sequence[Run], whole: Fitted) -> list[Constant]:
    """The constants with intervals; a draw that lacks a GPU, or cannot be fitted, is left out."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.row.gpu, run.row.model), []).append(run)
    names = list(whole.numbers())

    def solve(drawn: list[Run]) -> list[float] | None:
        try:
            numbers = fit(drawn).numbers()
        except ValueError:
            return None
        return [numbers[name] for name in names] if {*numbers} == {*names} else None

    lows, highs = bootstrap(list(groups.values()), solve)
    found = []
    for name, *numbers in zip(names, whole.numbers().values(), lows, highs, strict=True):
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
        check = known.check("each size")
        return replace(rates, lowest=check.lowest, highest=check.highest)
    check = known.check("each architecture")
    lowest = min(check.lowest, _LEAST_OF_CARDS) if device.link_is_pcie else check.lowest
    return replace(rates, lowest=lowest, highest=check.highest)


def by_block(device: Gpu, work: Work, seconds: float) -> Rates:
    """The GPU's rates where one transformer block, of this work, was measured.

    All parts are as much faster or slower than fitted; what is left to err is what runs of sizes
    that the fit had not seen do.
    """
    check = record().check("each size")
    return replace(
        rates_of(device).with_block(work, seconds), lowest=check.lowest, highest=check.highest
    )


def with_rates(hardware: Hardware) -> Hardware:
    """The cluster whose GPUs compute at fitted rates."""
    return replace(hardware, rates=rates_of(hardware.device))
