"""What seeds leave open: held-out metrics of cells that differ in the seed alone."""

from __future__ import annotations

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import SETTINGS
from analysis.compare.varying import OPTIONAL
from simulation.quantities import format_link

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
                found = dict(zip(_LIKE, keys, strict=True))
                rows.append(found | {"strategy": strategy} | _pooled(cells, alike))
    return pd.DataFrame(rows)


def _pooled(cells: pd.DataFrame, alike: pd.DataFrame) -> dict[str, object]:
    baseline = cells["baseline"].iloc[0]
    usual = alike[alike["strategy"] == baseline].set_index("seed")
    found: dict[str, object] = {"baseline": baseline, "seeds": len(cells)}
    for metric in METRICS:
        values = cells.set_index("seed")[metric]
        found |= {metric: values.mean(), f"{metric}_sd": values.std()}
        apart = (values - usual[metric]).dropna()
        found |= {f"{metric}_difference": apart.mean(), f"{metric}_difference_sd": apart.std()}
    return found


def in_words(compared: pd.DataFrame) -> pd.DataFrame:
    """Held-out metrics over seeds as strings, mean ± standard deviation; empty without seeds."""
    found = over_seeds(compared)
    if found.empty:
        return found

    def spread(column: str, form: str, unit: str = "", scale: float = 1.0) -> pd.Series:
        rows = zip(found[column] * scale, found[f"{column}_sd"] * scale, strict=True)
        return pd.Series([text.spread(*row, form, unit) for row in rows], index=found.index)

    own = found["strategy"] == found["baseline"]
    columns = {
        "Model": found["model"],
        **{
            OPTIONAL[name].setting.label: found[name].map(OPTIONAL[name].written)
            for name in OPTIONAL
            if name in found and found[name].nunique(dropna=False) > 1
        },
        "Link": found["inter_bandwidth_bits_per_s"].map(format_link),
        "Strategy": found["strategy"].map(strategies.label),
        "seeds": found["seeds"].map(str),
        "held-out loss": spread("held_out_loss", ".4f"),
        "loss difference": spread("held_out_loss_difference", "+.4f").mask(own, text.ABSENT),
        "held-out accuracy": spread("held_out_accuracy", ".2f", " %", 100),
        "accuracy difference": spread("held_out_accuracy_difference", "+.2f", " points", 100).mask(
            own, text.ABSENT
        ),
    }
    return filled(pd.DataFrame(columns))


def filled(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out the columns for which no cell has a value, such as device memory on CPU."""
    found: pd.DataFrame = table.loc[:, (table != text.ABSENT).any()]
    return found
