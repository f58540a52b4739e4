"""Figure of cyclic strategies: what each slot of a step sends, and what graphs keep in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis.figures import axes, captions
from analysis.figures.drawings import Drawing, drawing, line, put_legend, put_source, style

BYTES, KEPT = "bytes_by_slot", "activation_bytes_by_slot"


@dataclass(frozen=True)
class _Panel:
    column: str
    title: str
    slots: str
    #: Of which cells a level is drawn, and the column that has it.
    level_of: Callable[[pd.DataFrame], pd.DataFrame]
    level: str


_PANELS = (
    _Panel(
        BYTES,
        "MB that a rank sends, at most",
        "slot of the rank's step: forwards, then backwards",
        lambda cells: cells[cells["strategy"] == "ddp"],
        "inter_node_bytes_per_step",
    ),
    _Panel(
        KEPT,
        "MB kept for backward",
        "slot of the step",
        lambda cells: cells[cells[KEPT].notna()],
        "activation_bytes_together",
    ),
)


def draw(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> list[Drawing]:
    """A pair of axes for what there is; no figure where no cell has slots."""
    cells = cells[cells["state"] == "ok"]
    panels = [panel for panel in _PANELS if cells[panel.column].notna().any()]
    if not panels:
        return []
    with style():
        figure = Figure(figsize=(max(3.4 * len(panels), 5.0), 3.4), layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        drawn: dict[str, Line2D] = {}
        for panel, ax in zip(panels, grid, strict=True):
            _draw(ax, panel, cells, looks)
            having = [*cells.loc[cells[panel.column].notna(), "strategy"]]
            drawn |= {name: line(looks[name]) for name in having}
        put_legend(figure, [*drawn.values(), _level_mark()])
        put_source(figure, cells, setting)
    caption = captions.slots(cells)
    return [drawing(figure, cells, "slots", "Slots of a step", setting, caption)]


def _draw(ax: Axes, panel: _Panel, cells: pd.DataFrame, looks: axes.Looks) -> None:
    for _, cell in cells[cells[panel.column].notna()].iterrows():
        values = [value / 1e6 for value in cell[panel.column]]
        look = looks[cell["strategy"]]
        ax.plot(
            range(1, len(values) + 1),
            values,
            color=look.colour,
            linestyle=look.dashes,
            marker=look.marker,
            markersize=5,
        )
    for level in sorted({*panel.level_of(cells)[panel.level]}):
        ax.axhline(level / 1e6, color=axes.SOFT, linestyle="--", linewidth=1)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.slots)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)


def _level_mark() -> Line2D:
    return Line2D([], [], color=axes.SOFT, linestyle="--", linewidth=1, label="all at once")
