"""The simulator compared with what was run, cell by cell: errors, order, and costs of its choice.

Cells are joined by their ids. Those that differ in strategy and its settings alone are ordered;
repetitions of one count as one. Two are a pair if their times differ by more than ``_APART`` and
beyond their interval: of others the records do not say which is faster.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns

from analysis import strategies, text
from analysis.claims.papers import Claims, MatrixUse
from analysis.figures.drawings import Drawing, canvas
from analysis.load.runs import Run
from baselines import registry
from baselines.schedule import DEEPSPEED
from experiments.records.allowed import why_not_simulated
from experiments.records.comparison import Comparison, groups, once, paired, pooled
from experiments.records.modelled import cluster_of, measured_step
from experiments.records.parity import quantised
from experiments.records.record import Record
from simulation import emulated
from simulation.calibration import intervals
from simulation.emulated import FITTED_TO, FITTED_TO_LIMITED, largest_error, median_error, shares
from simulation.framing import MESSAGE_BYTES, SHARE

#: The predictions' knowledge of the records that they are compared with.
FITTED = (
    "The simulator's constants of this host are fitted to cells whose links are unshaped, and, "
    "where nodes have cores of their own, to limited ones of "
    f"{' and '.join(FITTED_TO_LIMITED['own'])} too. Of limited links it knows the limit, and how "
    "far DeepSpeed gathers ahead, which is fitted to the bytes of such cells too."
)
#: The excess that counted bytes may have over those predicted, in words.
FRAMING = (
    f"headers and acknowledgements: {100 * SHARE:g} % and {MESSAGE_BYTES} bytes a "
    f"message; of DeepSpeed's, {100 * DEEPSPEED.estimated_share:g} % more"
)
_LINKS = {True: "limited", False: "unshaped"}


#: A row of the report's tables, by its columns.
Shown = dict[str, Any]


def constants(records: Mapping[str, Sequence[Record]]) -> list[Shown]:
    """The simulator's constants by the records of each matrix; none where one of these is missing.

    Intervals hold nine of ten draws of a bootstrap.
    """
    fitted_to = FITTED_TO["shared"]
    if not records.keys() >= {*fitted_to}:
        return []
    of = (r for name in fitted_to for r in records[name] if not why_not_simulated(r.cell))
    steps = [step for r in of if (step := measured_step(r, cluster_of(r.cell))) is not None]
    rows = []
    for constant in intervals(steps):
        if constant.name in _SHARED:
            words, unit, scale = _SHARED[constant.name]
        else:
            engine, part = constant.name.split()
            per = "block and micro-batch" if part == "block" else "block and step"
            words, unit, scale = f"{engine}: calls per {per}", "ms", 1e3
        numbers = (constant.value, constant.low, constant.high)
        shown = ["no limit" if math.isinf(n) else text.number(scale * n) for n in numbers]
        row = dict(zip(("value", "low", "high"), shown, strict=True))
        rows.append({"name": words, "unit": unit} | row)
    return rows


#: Constants that all engines share: in words, the unit that each is shown in, and the factor to
#: that unit.
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
    """Each cell that ran and was predicted: its settings, seconds of both, and the comparison."""
    rows: list[dict[str, object]] = []
    for record, prediction in paired(records, predictions, lambda record: record.cell_id):
        if (simulated := prediction.measurement) is None:
            continue
        if (step := measured_step(record, cluster_of(record.cell))) is None:
            continue
        seconds, sent = median(simulated.round_seconds), simulated.inter_node_bytes_per_step
        rows.append(
            {
                "matrix": matrix,
                "tuning": record.cell.tuning,
                "engine": strategies.engine(record.cell.strategy),
                "link": _LINKS[record.cell.inter_bandwidth_bits_per_s is not None],
                "timed": step.seconds,
                "predicted": seconds,
                "comparison": emulated.Comparison(step, seconds, sent),
            }
        )
    return rows


def agreements(pairs: pd.DataFrame) -> list[Shown]:
    """A row for each matrix and kind of link.

    ``bytes_agree`` are cells whose bytes between nodes are the predicted ones, within framing;
    ``counted_full`` and ``counted_lora`` counted over predicted bytes, the median and the cell that
    is farthest off.
    """
    rows = []
    for (matrix, link), cells in pairs.groupby(["matrix", "link"], sort=True):
        compared = list(cells["comparison"])
        counted = {
            f"counted_{tuning}": "{:.3f}, {:.2f}".format(*shares(of["comparison"]))
            for tuning, of in cells.groupby("tuning")
        }
        row: Shown = {
            "matrix": str(matrix),
            "link": str(link),
            "cells": len(cells),
            "median_error": text.percent(median_error(compared)),
            "largest_error": largest_error(compared),
            "bytes_agree": sum(each.bytes_agree for each in compared),
        }
        rows.append(row | dict.fromkeys(("counted_full", "counted_lora"), text.ABSENT) | counted)
    return rows


#: The least relative difference of the times of a pair.
_APART = 0.15


@dataclass(frozen=True)
class Timed:
    """A cell's seconds per step, timed and predicted."""

    record: Record
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Order:
    matrix: str
    #: Whether its times may be read: as far as is known, nothing else ran beside its cells.
    quiet: bool
    pairs: int
    right: int
    #: Relative cost of taking the predicted fastest of strategies that train the same.
    costs: tuple[float, ...]


def order(
    matrix: str, records: Sequence[Record], predictions: Sequence[Record], readable: bool
) -> Order | None:
    """The order of a matrix's emulated cells; ``None`` where none can be compared.

    ``readable`` says whether its times may be read at all.
    """
    predicted = {once(record.cell).id: record.step_seconds_median for record in predictions}
    emulated = pooled(record for record in records if record.evidence == "emulated")
    timed = [
        [
            Timed(record, seconds, expected)
            for record in group
            if (seconds := record.step_seconds_median) is not None
            and (expected := predicted.get(record.cell_id)) is not None
        ]
        for group in groups(emulated)
    ]
    machines = [cell.record.machine for cells in timed for cell in cells]
    quiet = readable and not any(machine and machine.why_busy for machine in machines)
    pairs = [pair for cells in timed for pair in _pairs(cells)]
    costs = [cost for cells in timed if (cost := _cost(cells)) is not None]
    if not pairs and not costs:
        return None
    right = sum(fast.predicted < slow.predicted for fast, slow in pairs)
    return Order(matrix, quiet, len(pairs), right, tuple(costs))


def _pairs(cells: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Pairs, the faster first."""
    for fast, slow in combinations(sorted(cells, key=lambda cell: cell.seconds), 2):
        apart = slow.seconds > (1 + _APART) * fast.seconds
        if apart and Comparison(fast.record, slow.record).differs:
            yield fast, slow


def _cost(cells: Sequence[Timed]) -> float | None:
    """The cost of the predicted fastest; of several that are predicted alike, the slowest."""
    # Exact strategies whose traffic is not rounded: a plan takes no other.
    of = [(cell, cell.record.cell) for cell in cells]
    exact = [(cell, at) for cell, at in of if registry.find(at.strategy).numerics == "exact"]
    same = [cell for cell, at in exact if not quantised(at)]
    if len(same) < 2:
        return None
    taken = min(same, key=lambda cell: (cell.predicted, -cell.seconds))
    return taken.seconds / min(cell.seconds for cell in same) - 1


def choices(orders: Sequence[Order]) -> list[Shown]:
    """A row per matrix, then one over those whose times may be read, and one over all."""
    rows = [_row(each.matrix, each.quiet, [each]) for each in orders]
    rows.append(_row("together, if nothing ran beside", True, [o for o in orders if o.quiet]))
    return [*rows, _row("together", False, orders)]


def _row(name: str, quiet: bool, orders: Sequence[Order]) -> Shown:
    pairs = sum(each.pairs for each in orders)
    right = sum(each.right for each in orders)
    costs = [cost for each in orders for cost in each.costs]
    return {
        "matrix": name,
        "quiet": quiet,
        "pairs": pairs,
        "right": f"{right} ({100 * right / pairs:.1f} %)" if pairs else text.ABSENT,
        "choices": len(costs),
        "median_cost": f"{100 * median(costs):.0f} %" if costs else text.ABSENT,
        "largest_cost": f"{100 * max(costs):.0f} %" if costs else text.ABSENT,
    }


#: Half the width of the figure's band, as a share.
_BAND = 0.1
#: Markers of links that are predicted, and of those that the simulator's constants are fitted to.
_MARKERS = {"limited": "o", "unshaped": "s"}


def draw(pairs: pd.DataFrame) -> Drawing:
    """Predicted against timed seconds a step, both on logarithmic axes."""
    looks = {
        "DeepSpeed": strategies.BASELINE,
        "PyTorch": "fsdp2",
        "This engine": strategies.SUBJECT,
    }
    styles = strategies.styles(looks.values())
    ends = [pairs[["timed", "predicted"]].min().min() / 1.5]
    ends.append(pairs[["timed", "predicted"]].max().max() * 1.5)
    with canvas(4.6, 4.2) as (figure, ((ax,),)):
        line = np.array(ends)
        ax.fill_between(line, line * (1 - _BAND), line * (1 + _BAND), color="#E6E6E6", linewidth=0)
        ax.plot(line, line, color="#888888", linewidth=0.8)
        sns.scatterplot(
            pairs,
            x="timed",
            y="predicted",
            hue="engine",
            palette={engine: styles[name].colour for engine, name in looks.items()},
            hue_order=[engine for engine in looks if engine in set(pairs["engine"])],
            style="link",
            markers=_MARKERS,
            alpha=0.8,
            s=26,
            ax=ax,
        )
        ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        ax.set(xlabel="s/step, emulated (timed)", ylabel="s/step, simulated (predicted)")
        ax.legend(frameon=False)
    parts = [
        f"{link} links: {text.percent(median_error(cells['comparison']))} median absolute error of "
        f"{len(cells)} cells"
        for link, cells in pairs.groupby("link")
    ]
    caption = (
        f"Seconds a step of each cell, predicted against timed; {'; '.join(parts)}. The band is "
        f"±{100 * _BAND:g} %. {FITTED}"
    )
    return Drawing("validation", "Simulated against emulated steps", caption, figure)


def predicted(claims: Claims, of: Sequence[Run]) -> pd.DataFrame:
    """Cells that ran and were predicted, of matrices whose times may be read."""
    read = [run for run in of if _is_readable(claims, run)]
    by_matrix = [joined(run.matrix, run.records, run.predictions) for run in read]
    return pd.DataFrame([cell for cells in by_matrix for cell in cells])


def orders(claims: Claims, of: Sequence[Run]) -> list[Order]:
    """The order of each matrix, those included whose times may not be read."""
    ordered = (
        order(run.matrix, run.records, run.predictions, readable=_is_readable(claims, run))
        for run in of
    )
    return [each for each in ordered if each is not None]


def _is_readable(claims: Claims, run: Run) -> bool:
    return not claims.matrices.get(run.matrix, MatrixUse()).caveat
