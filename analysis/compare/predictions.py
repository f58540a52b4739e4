"""What the simulator predicts next to what was run: the same cells, joined by their ids."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from analysis import strategies, text
from baselines.schedule import DEEPSPEED
from experiments.records import modelled
from experiments.records.modelled import cluster_of, measured_step, why_not_simulated
from experiments.records.record import Record
from simulation.calibration import intervals
from simulation.emulated import FITTED_TO
from simulation.framing import MESSAGE_BYTES, SHARE

#: What the predictions know of the records that they are compared with.
FITTED = (
    "The simulator's constants of this host are fitted to cells whose links are unshaped. Of "
    "limited links it knows the limit, and how far DeepSpeed gathers ahead, which is fitted to the "
    "bytes of such cells too."
)
#: What counted bytes may be more than those predicted, in words.
FRAMING = (
    f"headers and acknowledgements: {100 * SHARE:g} % and {MESSAGE_BYTES} bytes a "
    f"message; of DeepSpeed's, {100 * DEEPSPEED.estimated_share:g} % more"
)
_LINKS = {True: "limited", False: "unshaped"}


@dataclass(frozen=True)
class Row:
    """How near the predictions of one matrix are, its links limited or not."""

    matrix: str
    link: str
    cells: int
    median_error: str
    largest_error: str
    #: Cells whose bytes between nodes are the predicted ones, within framing.
    bytes_agree: int
    #: Counted over predicted bytes by tuning: the median, and the cell that is farthest off.
    counted_full: str
    counted_lora: str


@dataclass(frozen=True)
class Fitted:
    """A constant of the host that the records were measured on, and its interval, as text."""

    name: str
    unit: str
    value: str
    low: str
    high: str


def constants(records: Mapping[str, Sequence[Record]]) -> list[Fitted]:
    """The simulator's constants by the records of each matrix; none where one of these is missing.

    Intervals hold nine of ten draws of a bootstrap.
    """
    if not records.keys() >= {*FITTED_TO}:
        return []
    of = (r for name in FITTED_TO for r in records[name] if not why_not_simulated(r.cell))
    steps = [step for r in of if (step := measured_step(r, cluster_of(r.cell))) is not None]
    found = []
    for constant in intervals(steps):
        words, unit, scale = _named(constant.name)
        numbers = (constant.value, constant.low, constant.high)
        value, low, high = (
            "no limit" if math.isinf(number) else text.number(scale * number) for number in numbers
        )
        found.append(Fitted(words, unit, value, low, high))
    return found


def _named(constant: str) -> tuple[str, str, float]:
    """A constant in words, the unit that it is shown in, and how many of these its own unit is."""
    if constant in _SHARED:
        return _SHARED[constant]
    engine, part = constant.split()
    what = "calls per block and micro-batch" if part == "block" else "calls per block and step"
    return f"{engine}: {what}", "ms", 1e3


#: Constants that all engines have in common.
_SHARED = {
    "flops": ("matrix products", "GFLOP/s", 1e-9),
    "message_seconds": ("messages", "µs", 1e6),
    "byte_seconds": ("bytes that are sent", "ns", 1e9),
    "gathered_byte_seconds": ("bytes that are gathered", "ns", 1e9),
    "activation_byte_seconds": ("bytes that are kept for backward", "ns", 1e9),
}


def joined(
    matrix: str, records: Sequence[Record], predictions: Sequence[Record]
) -> list[dict[str, object]]:
    """Each cell that ran and was predicted: its settings, seconds of both, bytes."""
    by_id = {prediction.cell_id: prediction for prediction in predictions}
    found: list[dict[str, object]] = []
    for record in records:
        prediction = by_id.get(record.cell_id)
        if record.measurement is None or prediction is None or prediction.measurement is None:
            continue
        counted = record.measurement.inter_node_bytes_per_step
        expected = prediction.measurement.inter_node_bytes_per_step
        found.append(
            {
                "matrix": matrix,
                "tuning": record.cell.tuning,
                "engine": strategies.engine(record.cell.strategy),
                "link": _LINKS[record.cell.inter_bandwidth_bits_per_s is not None],
                "timed": record.step_seconds_median,
                "predicted": prediction.step_seconds_median,
                "bytes_agree": modelled.agree(record.cell, expected, counted),
                "counted_share": counted / expected if expected else math.nan,
            }
        )
    return found


def rows(pairs: pd.DataFrame) -> list[Row]:
    """One for each matrix and kind of link."""
    found = []
    for (matrix, link), cells in pairs.groupby(["matrix", "link"], sort=True):
        errors = _errors(cells)
        shares = {tuning: _shares(of["counted_share"]) for tuning, of in cells.groupby("tuning")}
        largest = max(errors, key=abs)
        found.append(
            Row(
                matrix=str(matrix),
                link=str(link),
                cells=len(cells),
                median_error=text.percent(median_error(cells)),
                largest_error=f"{100 * largest:+.0f} %",
                bytes_agree=int(cells["bytes_agree"].sum()),
                counted_full=shares.get("full", text.ABSENT),
                counted_lora=shares.get("lora", text.ABSENT),
            )
        )
    return found


def median_error(cells: pd.DataFrame) -> float:
    """Median of the absolute errors of the steps' times, as a share; there must be a cell."""
    return median(abs(error) for error in _errors(cells))


def _shares(counted: pd.Series[float]) -> str:
    """The median, and the share that is farthest from 1."""
    farthest = max(counted, key=lambda share: abs(share - 1))
    return f"{counted.median():.3f}, {farthest:.2f}"


def _errors(cells: pd.DataFrame) -> list[float]:
    """Relative; above 0 where the prediction is too slow."""
    return list(cells["predicted"] / cells["timed"] - 1)
