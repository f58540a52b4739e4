"""What training apart costs: held-out loss over the steps between two exchanges."""

from __future__ import annotations

import re

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from analysis import strategies
from analysis.figures import axes, captions
from analysis.figures.drawings import Drawing, drawing, line, panels_of, put_legend, style

#: The interval in the name of what is compared, which these axes say.
_INTERVAL = re.compile(r" τ = \d+")


def has_intervals(cells: pd.DataFrame) -> bool:
    """Whether held-out losses are known of workers that train apart for longer and for less."""
    known = cells[cells["held_out_loss"].notna() & (cells["steps_per_round"] > 1)]
    return known["steps_per_round"].nunique() > 1


def draw_intervals(cells: pd.DataFrame, setting: str = "") -> Drawing:
    """A point per cell and a line through medians; a level line where each step exchanges."""
    known = cells[cells["held_out_loss"].notna()]
    known = known.assign(strategy=known["strategy"].str.replace(_INTERVAL, "", regex=True))
    looks = strategies.styles(known["strategy"])
    panels = panels_of(known)
    with style():
        size = (max(3.2 * len(panels), 5.0), 3.4)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for (title, panel), ax in zip(panels, grid, strict=True):
            ax.set_title(title)
            _draw(ax, panel, looks)
        grid[0].set_ylabel("held-out loss")
        put_legend(figure, [*map(line, looks.values())])
    caption = captions.intervals(known)
    return drawing(figure, cells, "intervals", "Held-out loss over the interval", setting, caption)


def _draw(ax: Axes, panel: pd.DataFrame, looks: axes.Looks) -> None:
    for name, look in looks.items():
        own = panel[panel["strategy"] == name]
        losses = own.groupby("steps_per_round")["held_out_loss"].median()
        if list(losses.index) == [1]:
            ax.axhline(losses[1], color=look.colour, linestyle=look.dashes, linewidth=1.6)
            continue
        ax.plot(losses.index, losses, color=look.colour, linestyle=look.dashes, linewidth=1.6)
        ax.plot(
            own["steps_per_round"],
            own["held_out_loss"],
            color=look.colour,
            marker=look.marker,
            markersize=4.5,
            linestyle="none",
        )
    ticks = sorted(panel.loc[panel["steps_per_round"] > 1, "steps_per_round"].unique())
    ax.set(xscale="log", xlabel="steps between two exchanges, τ")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{tick:g}" for tick in ticks])
