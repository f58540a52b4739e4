"""What each cell is worth next to the baseline that ran under the same settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import strategies
from analysis.load.table import frame
from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, groups, reference
from experiments.records.record import Record

_CONDITIONS = settings.names(Cell, "condition")
#: Cells are compared only where all of these agree; how many steps were timed may differ.
SETTINGS = ["matrix", "evidence", *(name for name in _CONDITIONS if name != "matrix")]


@dataclass(frozen=True)
class Headline:
    """The subject next to the baseline under one way of tuning, and where the best case stands."""

    tuning: str
    evidence: str
    subject: str
    baseline: str
    #: The cell with the largest speed-up.
    cell: str
    model: str
    bandwidth: float
    speed_up: float
    #: The fastest other strategy that ran under the same settings, which may not be the baseline.
    fastest_other: str
    speed_up_over_fastest_other: float
    bytes_of_baseline: float
    bytes_of_baseline_closed_form: float
    #: Of all cells that have this baseline, the one above included.
    speed_ups: tuple[float, ...]
    bytes_of_baselines: tuple[float, ...]


def compare(records: Sequence[Record], baseline: str = strategies.BASELINE) -> pd.DataFrame:
    """A row per cell in display order with, beside each, how it compares; none is lost.

    Added columns: ``baseline`` (the strategy compared with: the one asked for or, where that has
    no result, a usual one or the first that has), ``speed_up`` and the ends of its interval,
    ``speed_up_low`` and ``speed_up_high``, ``decides`` (1 where its rounds are enough),
    ``fastest_other`` (the fastest other strategy), ``speed_up_over_fastest_other``,
    ``bytes_of_baseline``, ``bytes_of_baseline_closed_form``, ``bytes_of_closed_form`` (all ratios),
    ``ledger_disagreement_percent``, ``loss_difference`` and ``loss_difference_max``; and
    ``comparison``, a number that cells have in common which are compared.
    """
    table = frame(records)
    at = {id(record): place for place, record in enumerate(records)}
    found = []
    for number, group in enumerate(groups(records)):
        rows = table.iloc[[at[id(record)] for record in group]]
        found.append(_compare_group(rows, group, baseline).assign(comparison=number))
    return _in_display_order(pd.concat(found))


def headlines(compared: pd.DataFrame, subject: str = strategies.SUBJECT) -> list[Headline]:
    """One headline for each evidence and tuning, over the baseline that most cells have."""
    rows = compared[
        (compared["strategy"] == subject)
        & (compared["baseline"] != subject)
        & compared["speed_up"].notna()
    ]
    found = []
    for _, cells in rows.groupby(["evidence", "tuning"], sort=True):
        baseline = cells["baseline"].value_counts().index[0]
        group = cells[cells["baseline"] == baseline].sort_values("speed_up", kind="stable")
        best = group.iloc[-1]
        found.append(
            Headline(
                tuning=best["tuning"],
                evidence=best["evidence"],
                subject=subject,
                baseline=best["baseline"],
                cell=best["cell"],
                model=best["model"],
                bandwidth=best["inter_bandwidth_bits_per_s"],
                speed_up=best["speed_up"],
                fastest_other=best["fastest_other"],
                speed_up_over_fastest_other=best["speed_up_over_fastest_other"],
                bytes_of_baseline=best["bytes_of_baseline"],
                bytes_of_baseline_closed_form=best["bytes_of_baseline_closed_form"],
                speed_ups=tuple(group["speed_up"]),
                bytes_of_baselines=tuple(group["bytes_of_baseline"]),
            )
        )
    return found


def annotated(cells: pd.DataFrame) -> pd.DataFrame:
    """The subject's cells whose speed-up a figure states: over the default baseline only."""
    subject = cells["strategy"] == strategies.SUBJECT
    annotated: pd.DataFrame = cells[subject & (cells["baseline"] == strategies.BASELINE)]
    return annotated


def ratio(value: float, reference: float) -> float:
    """``value / reference``; not a number where either is missing or there is nothing to divide."""
    if math.isnan(value) or math.isnan(reference) or reference == 0:
        return math.nan
    return float(value / reference)


def _compare_group(rows: pd.DataFrame, group: Sequence[Record], wanted: str) -> pd.DataFrame:
    """Add the comparison columns to the cells of one setting."""
    over = _reference(group, wanted)
    at = next((place for place, record in enumerate(group) if record is over), None)
    baseline = None if at is None else rows.iloc[at]
    columns = [
        {**_compare_cell(cell, baseline, Comparison(of, over)), **_compare_with_fastest(cell, rows)}
        for (_, cell), of in zip(rows.iterrows(), group, strict=True)
    ]
    beside: pd.DataFrame = pd.concat([rows, pd.DataFrame(columns, index=rows.index)], axis=1)
    return beside


def _reference(group: Sequence[Record], wanted: str) -> Record | None:
    """The finished cell of the wanted baseline, else of a usual one, else of the first."""
    names = strategies.ordered(of.cell.subject for of in group if of.state == "ok")
    return reference(group, wanted) or reference(group, names[0] if names else None)


def _compare_cell(
    cell: pd.Series, reference: pd.Series | None, speed: Comparison
) -> dict[str, object]:
    """One cell's comparison columns; a cell without a result has only the baseline's name."""
    name = None if reference is None else reference["strategy"]
    values: dict[str, object] = dict.fromkeys(_RATIOS, math.nan)
    if reference is None or cell["state"] != "ok":
        return {"baseline": name, **values}
    assert speed.interval is not None, "both ran"
    known: dict[str, object] = {"speed_up": speed.ratio}
    if speed.of is not speed.over:
        known |= dict(zip(SPEED[1:], speed.interval, strict=True)) | {"decides": speed.decides}
    sent, closed_form = cell["inter_node_bytes_per_step"], cell["inter_node_bytes_closed_form"]
    ledger = cell["ledger_inter_node_bytes_per_step"]
    return {
        "baseline": name,
        **values,
        **known,
        "bytes_of_baseline": ratio(sent, reference["inter_node_bytes_per_step"]),
        "bytes_of_baseline_closed_form": ratio(sent, reference["inter_node_bytes_closed_form"]),
        "bytes_of_closed_form": ratio(sent, closed_form),
        "ledger_disagreement_percent": (ratio(ledger, sent) - 1) * 100,
        **_loss_differences(cell["losses"], reference["losses"]),
    }


def _compare_with_fastest(cell: pd.Series, group: pd.DataFrame) -> dict[str, object]:
    """The cell next to the fastest of the other strategies that finished."""
    others = group[(group["state"] == "ok") & (group["strategy"] != cell["strategy"])]
    if others.empty or cell["state"] != "ok":
        return {"fastest_other": None, "speed_up_over_fastest_other": math.nan}
    fastest = others.sort_values("tokens_per_s", ascending=False, kind="stable").iloc[0]
    return {
        "fastest_other": fastest["strategy"],
        "speed_up_over_fastest_other": ratio(cell["tokens_per_s"], fastest["tokens_per_s"]),
    }


#: Times as fast as the baseline, and the ends of its interval.
SPEED = ("speed_up", "speed_up_low", "speed_up_high")
_RATIOS = (
    *SPEED,
    "decides",
    "bytes_of_baseline",
    "bytes_of_baseline_closed_form",
    "bytes_of_closed_form",
    "ledger_disagreement_percent",
    "loss_difference",
    "loss_difference_max",
)


def _loss_differences(losses: list[float], reference: list[float]) -> dict[str, float]:
    """At the last step that both have, and the largest at any step."""
    steps = min(len(losses), len(reference))
    if steps == 0:
        return {"loss_difference": math.nan, "loss_difference_max": math.nan}
    apart = np.subtract(losses[:steps], reference[:steps])
    return {
        "loss_difference": float(apart[-1]),
        "loss_difference_max": float(np.max(np.abs(apart))),
    }


def _in_display_order(table: pd.DataFrame) -> pd.DataFrame:
    """By setting, slowest link first and unshaped last, then by strategy as in the figures."""
    place = {name: at for at, name in enumerate(strategies.ordered(table["strategy"]))}
    placed: pd.DataFrame = table.assign(_place=table["strategy"].map(place))
    placed = placed.sort_values([*SETTINGS, "_place"], na_position="last", kind="stable")
    ordered: pd.DataFrame = placed.drop(columns="_place").reset_index(drop=True)
    return ordered
