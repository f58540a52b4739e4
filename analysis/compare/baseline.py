"""Each cell next to the baseline that ran under the same settings."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis import strategies, text
from analysis.load.table import frame, ledger
from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, groups, reference
from experiments.records.record import Record
from simulation.quantities import format_link

#: Cells are compared only where all of these agree; how many steps were timed may differ.
SETTINGS = list(dict.fromkeys(["matrix", "evidence", *settings.names(Cell, "condition")]))
#: Columns of the speed-up over the baseline, and of the ends of its interval.
SPEED = ("speed_up", "speed_up_low", "speed_up_high")
_BESIDE = (
    *SPEED,
    "decides",
    "bytes_of_baseline",
    "bytes_of_baseline_closed_form",
    "bytes_of_closed_form",
    "ledger_disagreement_percent",
    "loss_difference",
    "loss_difference_max",
)


def compare(records: Sequence[Record], baseline: str = strategies.BASELINE) -> pd.DataFrame:
    """A row per cell in display order, with columns that compare it; no cell is lost.

    Added columns: ``baseline`` (the strategy compared with: the one asked for or, where that has
    no result, a usual one or the first that has), ``speed_up`` and the ends of its interval,
    ``speed_up_low`` and ``speed_up_high``, ``decides`` (1 where its rounds are enough),
    ``fastest_other`` (the fastest other strategy), ``speed_up_over_fastest_other``,
    ``bytes_of_baseline``, ``bytes_of_baseline_closed_form``, ``bytes_of_closed_form`` (all ratios),
    ``ledger_disagreement_percent``, ``loss_difference`` and ``loss_difference_max``; and
    ``comparison``, a number that is the same for cells that are compared with one another.
    """
    ordered, beside = list[Record](), list[dict[str, object]]()
    for number, group in enumerate(groups(records)):
        # The baseline, else a usual one, else the first that has finished.
        finished = strategies.ordered(of.cell.subject for of in group if of.state == "ok")
        over = reference(group, baseline) or reference(group, next(iter(finished), None))
        ordered += group
        beside += [
            {
                "baseline": None if over is None else over.cell.subject,
                **dict.fromkeys(_BESIDE, math.nan),
                **_compared(Comparison(record, over)),
                **_with_fastest(record, group),
                "comparison": number,
            }
            for record in group
        ]
    return _in_display_order(pd.concat([frame(ordered), pd.DataFrame(beside)], axis=1))


def headlines(compared: pd.DataFrame) -> list[tuple[pd.Series, pd.DataFrame]]:
    """For each evidence and tuning, the subject's cells over the baseline that most of them have.

    The cell with the largest speed-up comes before them.
    """
    rows = compared[
        (compared["strategy"] == strategies.SUBJECT)
        & (compared["baseline"] != strategies.SUBJECT)
        & compared["speed_up"].notna()
    ]
    pairs = []
    for _, cells in rows.groupby(["evidence", "tuning"], sort=True):
        baseline = cells["baseline"].value_counts().index[0]
        group = cells[cells["baseline"] == baseline].sort_values("speed_up", kind="stable")
        pairs.append((group.iloc[-1], group))
    return pairs


def annotated(cells: pd.DataFrame) -> pd.DataFrame:
    """The subject's cells whose speed-up a figure states: over the default baseline only."""
    subject = cells["strategy"] == strategies.SUBJECT
    annotated: pd.DataFrame = cells[subject & (cells["baseline"] == strategies.BASELINE)]
    return annotated


def ratio(value: float | None, reference: float | None) -> float:
    """``value / reference``; NaN where either is missing or the reference is 0."""
    if value is None or not reference:
        return math.nan
    return value / reference


def _compared(speed: Comparison) -> dict[str, object]:
    """The columns that compare a cell with its baseline; none where either has no result."""
    mine, other = speed.of.measurement, None if speed.over is None else speed.over.measurement
    if mine is None or other is None or speed.of.state != "ok":
        return {}
    assert speed.interval is not None, "both ran"
    known: dict[str, object] = {"speed_up": speed.ratio}
    if speed.of is not speed.over:
        known |= dict(zip(SPEED[1:], speed.interval, strict=True)) | {"decides": speed.decides}
    sent = mine.inter_node_bytes_per_step
    counted = ledger(mine.ledger_bytes_per_step).get("ledger_inter_node_bytes_per_step")
    return {
        **known,
        "bytes_of_baseline": ratio(sent, other.inter_node_bytes_per_step),
        "bytes_of_baseline_closed_form": ratio(sent, other.inter_node_bytes_closed_form),
        "bytes_of_closed_form": ratio(sent, mine.inter_node_bytes_closed_form),
        "ledger_disagreement_percent": (ratio(counted, sent) - 1) * 100,
        **_loss_differences(mine.losses, other.losses),
    }


def _with_fastest(record: Record, group: Sequence[Record]) -> dict[str, object]:
    """The columns that compare a cell with the fastest other strategy that finished."""
    others = [of for of in group if of.state == "ok" and of.cell.subject != record.cell.subject]
    fastest = max(others, key=lambda of: of.tokens_per_s or 0.0, default=None)
    if fastest is None or record.state != "ok":
        return {"fastest_other": None, "speed_up_over_fastest_other": math.nan}
    return {
        "fastest_other": fastest.cell.subject,
        "speed_up_over_fastest_other": ratio(record.tokens_per_s, fastest.tokens_per_s),
    }


def _loss_differences(losses: list[float], reference: list[float]) -> dict[str, float]:
    """The difference at the last step that both have, and the largest at any step."""
    both = np.array([*zip(losses, reference, strict=False)])
    if not both.size:
        return {}
    apart = both[:, 0] - both[:, 1]
    return {"loss_difference": float(apart[-1]), "loss_difference_max": float(abs(apart).max())}


def _in_display_order(table: pd.DataFrame) -> pd.DataFrame:
    """The table by setting, slowest link first and unshaped last, then by strategy."""
    place = {name: at for at, name in enumerate(strategies.ordered(table["strategy"]))}
    return table.sort_values(
        [*SETTINGS, "strategy"],
        key=lambda column: column.map(place) if column.name == "strategy" else column,
        na_position="last",
        ignore_index=True,
    )


#: Settings that a table names only where they differ between its cells.
OPTIONAL = {
    name: item
    for name in settings.names(Cell, "condition")
    if not (item := settings.described(Cell)[name]).setting.always
}
#: A panel of a figure shows cells that agree in the first of these, over all strategies and all
#: values of the second.
PANEL = settings.names(Cell, "condition", place="model")
AXES = settings.names(Cell, "condition", place="axis")


def varying(table: pd.DataFrame) -> list[str]:
    """The optional settings that differ between the cells of this table that ran."""
    ran = table[table["state"] != "skipped"]
    return [name for name in OPTIONAL if ran[name].nunique(dropna=False) > 1]


def setting_in_words(name: str, value: object) -> str:
    """An optional setting and its value, such as ``accumulation 4``."""
    return f"{OPTIONAL[name].setting.label.lower()} {OPTIONAL[name].written(value)}"


#: Metrics of held-out data that may have a value for each seed.
METRICS = ("held_out_loss", "held_out_accuracy")
_LIKE = [name for name in SETTINGS if name != "seed"]


def over_seeds(compared: pd.DataFrame) -> pd.DataFrame:
    """One row per strategy and setting of which several seeds have held-out data; may be empty.

    Columns: the settings but the seed, ``strategy``, ``baseline``, ``seeds`` and, per metric,
    its mean, ``…_sd``, and ``…_difference`` and ``…_difference_sd``, seed by seed, from the
    baseline's cell of the same seed.
    """
    measured = compared[(compared["state"] == "ok") & compared["held_out_loss"].notna()]
    rows = []
    for keys, alike in measured.groupby(_LIKE, dropna=False, sort=False):
        for strategy, cells in alike.groupby("strategy", sort=False):
            if len(cells) > 1:
                row = dict(zip(_LIKE, keys, strict=True))
                rows.append(row | {"strategy": strategy} | _pooled(cells, alike))
    return pd.DataFrame(rows)


def _pooled(cells: pd.DataFrame, alike: pd.DataFrame) -> dict[str, object]:
    baseline = cells["baseline"].iloc[0]
    usual = alike[alike["strategy"] == baseline].set_index("seed")
    columns: dict[str, object] = {"baseline": baseline, "seeds": len(cells)}
    for metric in METRICS:
        values = cells.set_index("seed")[metric]
        columns |= {metric: values.mean(), f"{metric}_sd": values.std()}
        apart = (values - usual[metric]).dropna()
        columns |= {f"{metric}_difference": apart.mean(), f"{metric}_difference_sd": apart.std()}
    return columns


def seeds_in_words(compared: pd.DataFrame) -> pd.DataFrame:
    """Held-out metrics over seeds as strings, mean ± standard deviation; empty without seeds."""
    table = over_seeds(compared)
    if table.empty:
        return table

    def spread(column: str, form: str, unit: str = "", scale: float = 1.0) -> pd.Series:
        rows = zip(table[column] * scale, table[f"{column}_sd"] * scale, strict=True)
        return pd.Series([text.spread(*row, form, unit) for row in rows], index=table.index)

    itself = table["strategy"] == table["baseline"]
    columns = {
        "Model": table["model"],
        **{
            OPTIONAL[name].setting.label: table[name].map(OPTIONAL[name].written)
            for name in OPTIONAL
            if name in table and table[name].nunique(dropna=False) > 1
        },
        "Link": table["inter_bandwidth_bits_per_s"].map(format_link),
        "Strategy": table["strategy"].map(strategies.label),
        "seeds": table["seeds"].map(str),
        "held-out loss": spread("held_out_loss", ".4f"),
        "loss difference": spread("held_out_loss_difference", "+.4f").mask(itself, text.ABSENT),
        "held-out accuracy": spread("held_out_accuracy", ".2f", " %", 100),
        "accuracy difference": spread("held_out_accuracy_difference", "+.2f", " points", 100).mask(
            itself, text.ABSENT
        ),
    }
    return filled(pd.DataFrame(columns))


def filled(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out the columns for which no cell has a value, such as device memory on CPU."""
    present: pd.DataFrame = table.loc[:, (table != text.ABSENT).any()]
    return present
