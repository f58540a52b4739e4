"""The figure of what the simulator predicts against what was timed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from analysis import strategies, text
from analysis.compare.predictions import FITTED, median_error
from analysis.figures.drawings import Drawing, style

#: How near the figure's band is, as a share.
_BAND = 0.1
#: One each for what is predicted, and what the constants of the simulator were fitted to.
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
    with style():
        figure = Figure(figsize=(4.6, 4.2), layout="constrained")
        ax = figure.subplots()
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
    return Drawing("validation", "Simulated against emulated steps", _caption(pairs), figure)


def _caption(pairs: pd.DataFrame) -> str:
    parts = [
        f"{link} links: {text.percent(median_error(cells))} median absolute error of "
        f"{len(cells)} cells"
        for link, cells in pairs.groupby("link")
    ]
    return (
        f"Seconds a step of each cell, predicted against timed; {'; '.join(parts)}. The band is "
        f"±{100 * _BAND:g} %. {FITTED}"
    )
