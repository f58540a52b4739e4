"""What each cell is worth next to the baseline that ran under the same settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import strategies
from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.repeats import overlap
from experiments.records.variants import reference as usual

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


def compare(table: pd.DataFrame, baseline: str = strategies.BASELINE) -> pd.DataFrame:
    """The table in display order with, beside each cell, how it compares; no row is lost.

    Added columns: ``baseline`` (the strategy compared with: the one asked for or, where that has
    no result, the usual one or the first that has), ``speed_up``, ``within_spread`` (1 where that
    is no more than the spread of both cells' steps, else 0), ``fastest_other`` (the
    fastest other strategy), ``speed_up_over_fastest_other``, ``bytes_of_baseline``,
    ``bytes_of_baseline_closed_form``, ``bytes_of_closed_form`` (all ratios),
    ``ledger_disagreement_percent``, ``loss_difference`` and ``loss_difference_max``.
    """
    groups = [
        group
        for _, matrix in table.groupby("matrix", sort=False)
        for _, group in matrix.groupby(must_agree(matrix), dropna=False, sort=False)
    ]
    return _in_display_order(pd.concat([_compare_group(group, baseline) for group in groups]))


def must_agree(matrix: pd.DataFrame) -> list[str]:
    """The columns in which cells of this matrix must agree to be compared."""
    columns = [*SETTINGS, "strategy"]
    ran = matrix.loc[matrix["state"] != "skipped", columns].astype(object)
    # What is missing becomes None, which equals itself.
    cells = ran.where(ran.notna(), None).itertuples(index=False)
    rows = [dict(zip(columns, cell, strict=True)) for cell in cells]
    return ["evidence", *settings.must_agree(Cell, rows)]


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


def _compare_group(group: pd.DataFrame, wanted: str) -> pd.DataFrame:
    """Add the comparison columns to the cells of one setting."""
    reference = _reference(group, wanted)
    columns = [
        {**_compare_cell(cell, reference), **_compare_with_fastest(cell, group)}
        for _, cell in group.iterrows()
    ]
    beside: pd.DataFrame = pd.concat([group, pd.DataFrame(columns, index=group.index)], axis=1)
    return beside


def _reference(group: pd.DataFrame, wanted: str) -> pd.Series | None:
    """The finished cell of the wanted baseline, else of the usual ones, else of the first."""
    finished = group[group["state"] == "ok"]
    names = strategies.ordered(finished["strategy"])
    if not names:
        return None
    name = wanted if wanted in names else usual(names) or names[0]
    reference: pd.Series = finished[finished["strategy"] == name].iloc[0]
    return reference


def _compare_cell(cell: pd.Series, reference: pd.Series | None) -> dict[str, object]:
    """One cell's comparison columns; a cell without a result has only the baseline's name."""
    name = None if reference is None else reference["strategy"]
    values: dict[str, object] = dict.fromkeys(_RATIOS, math.nan)
    if reference is None or cell["state"] != "ok":
        return {"baseline": name, **values}
    sent, closed_form = cell["inter_node_bytes_per_step"], cell["inter_node_bytes_closed_form"]
    ledger = cell["ledger_inter_node_bytes_per_step"]
    return {
        "baseline": name,
        "speed_up": ratio(cell["tokens_per_s"], reference["tokens_per_s"]),
        "within_spread": float(
            cell["cell"] != reference["cell"] and overlap(_middle(cell), _middle(reference))
        ),
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


def _middle(cell: pd.Series) -> tuple[float, float]:
    return cell["step_seconds_q1"], cell["step_seconds_q3"]


_RATIOS = (
    "speed_up",
    "within_spread",
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
