"""What seeds leave open: held-out metrics of cells that differ in the seed alone."""

from __future__ import annotations

import pandas as pd

from analysis.compare.baseline import SETTINGS

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
