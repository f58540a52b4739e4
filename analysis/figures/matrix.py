"""Figures of the records: throughput and bytes by bandwidth, losses, slots, intervals.

Every number drawn is a value of the comparison table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from analysis import strategies
from analysis.compare.baseline import AXES, PANEL, SETTINGS, setting_in_words, varying
from analysis.figures import axes, drawings
from simulation.quantities import format_link

#: Up to this many panels stand side by side; more are stacked.
WIDEST = 4
#: A matrix with more figures than this sweeps what it does not know; it is read from its table, and
#: by those who fit to it.
MOST_FIGURES = 12
#: More strategies than this are drawn in small multiples, an engine a column.
CROWD = 6


def draw(compared: pd.DataFrame) -> list[drawings.Drawing]:
    """The figures of each matrix, kinds of evidence apart; none where no cell has a result.

    A cell that its matrix leaves out is not drawn; one that ran and has no result is.
    """
    looks = strategies.styles(compared.loc[compared["state"] != "skipped", "strategy"])
    drawings = []
    for cells, setting in parted(compared):
        if (cells["state"] != "ok").all():
            continue
        present = {name: look for name, look in looks.items() if name in set(cells["strategy"])}
        drawings += _draw(cells, present, setting)
        drawings += _draw_slots(cells, present, setting)
        drawings += _draw_phases(cells, present, setting)
    return drawings


def parted(compared: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str]]:
    """The cells of each figure that ran, and what sets it apart from others of its matrix."""
    ran = compared[compared["state"] != "skipped"]
    for _, matrix in ran.groupby("matrix", sort=False):
        # In simulations each strategy may have its own.
        mixed = matrix.groupby("comparison")["micro_batch"].nunique().max() > 1
        left = {*PANEL, *AXES, *(["micro_batch"] if mixed else [])}
        apart = [name for name in SETTINGS if name not in left]
        groups = matrix.groupby(apart, dropna=False, sort=False)
        if groups.ngroups > MOST_FIGURES:
            continue
        for _, cells in groups:
            yield cells, _setting(cells, matrix, apart)


def _draw(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> list[drawings.Drawing]:
    if len(looks) > CROWD:
        drawn = [_crowd_throughput(cells, looks, setting), _crowd_bytes(cells, looks, setting)]
        draw_loss = _crowd_losses
    else:
        drawn, draw_loss = [draw_traffic(cells, looks, setting)], draw_losses
    # A simulation has no losses.
    finished = cells[cells["state"] == "ok"]
    if finished["losses"].str.len().any():
        drawn.append(draw_loss(cells, looks, setting))
    if has_intervals(finished):
        drawn.append(_draw_intervals(finished, setting))
    return drawn


def _setting(cells: pd.DataFrame, matrix: pd.DataFrame, apart: list[str]) -> str:
    """Settings that set this figure apart from others of its matrix, such as ``accumulation 4``."""
    first = cells.iloc[0]
    differ = varying(matrix)
    words = [setting_in_words(name, first[name]) for name in differ if name in apart]
    own = ["each at its own micro-batch"] if "micro_batch" in {*differ} - {*apart} else []
    return ", ".join(words + own)


def draw_traffic(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> drawings.Drawing:
    """Throughput against bandwidth, and bytes between nodes a step, a pair of axes each panel."""
    panels = drawings.panels_of(cells)
    with drawings.style():
        figure, pairs = _pairs_of_axes(len(panels), drawings.label_width(looks))
        links = cells["inter_bandwidth_bits_per_s"].unique()
        one_link = format_link(links[0]) if len(links) == 1 else None
        for (title, panel), (upper, lower) in zip(panels, pairs, strict=True):
            upper.set_title(title)
            if one_link:
                axes.draw_throughput_of_one_link(upper, panel, looks)
            else:
                axes.draw_throughput(upper, panel, looks)
            axes.draw_bytes(lower, panel, looks)
        _name_outer_axes(pairs, len(panels) <= WIDEST, one_link)
        drawings.put_legend(
            figure,
            [
                *map(drawings.line, looks.values()),
                *drawings.least_mark(cells),
                *drawings.missing_mark(cells),
            ],
        )
        drawings.put_source(figure, cells, setting)
    caption = drawings.caption_of_both(cells)
    return drawings.drawing(
        figure, cells, "traffic", "Throughput and traffic between nodes", setting, caption
    )


def draw_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> drawings.Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    panels = drawings.panels_of(cells)
    columns = min(len(panels), WIDEST)
    rows = -(-len(panels) // columns)
    size = max(2.25 * columns, 4.0), 2.1 * rows + 0.6
    with _grid(panels, size, rows, columns) as (figure, grid):
        for (title, panel), ax in zip(panels, grid, strict=False):
            ax.set_title(title)
            axes.draw_loss(ax, panel, looks)
        grid[0].set_ylabel("training loss")
        drawings.put_legend(figure, [drawings.stroke(look) for look in looks.values()])
    return drawings.drawing(
        figure, cells, "losses", "Training loss", setting, drawings.caption_of_losses(cells)
    )


@contextmanager
def _grid(
    panels: Sequence[object], size: tuple[float, float], rows: int, columns: int, **shared: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with axes for so many panels, and none where there is no panel."""
    with drawings.canvas(*size, rows, columns, **shared) as (figure, grid):
        for ax in grid.flat[len(panels) :]:
            ax.set_axis_off()
        yield figure, [*grid.flat]


def _pairs_of_axes(panels: int, label: float) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """Panels as columns while they are few, as rows otherwise."""
    if panels <= WIDEST:
        size = (max(1.95 * panels + 1.1, 5.0) + label * panels, 4.5)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(2, panels, sharey="row", squeeze=False, height_ratios=[1.5, 1])
        return figure, [(grid[0, at], grid[1, at]) for at in range(panels)]
    figure = Figure(figsize=(7.5 + 2 * label, 2.0 * panels + 0.6), layout="constrained")
    grid = figure.subplots(panels, 2, squeeze=False)
    return figure, [(grid[at, 0], grid[at, 1]) for at in range(panels)]


def _name_outer_axes(pairs: list[tuple[Axes, Axes]], columns: bool, one_link: str | None) -> None:
    """Axis labels once a row or column, not once a panel."""
    for at, (upper, lower) in enumerate(pairs):
        if columns or at == len(pairs) - 1:
            upper.set_xlabel(f"tokens/s, {one_link}" if one_link else "link between nodes, Mbit/s")
            lower.set_xlabel("MB a step, busiest node")
        if not one_link and (at == 0 or not columns):
            upper.set_ylabel("tokens/s")
            axes.tick_throughput(upper)


#: Width of a column and height of a row of small multiples, in inches.
WIDTH, HEIGHT = 2.7, 2.0
#: From one bar to the next, in inches.
PITCH = 0.19
#: Up to this many panels of bars stand side by side.
ABREAST = 3


def _crowd_throughput(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Lines over the links, or bars where there is but one."""
    links = cells["inter_bandwidth_bits_per_s"].unique()
    if len(links) == 1:
        name = f"tokens/s, {format_link(links[0])}"
        figure = _bars(cells, looks, axes.draw_throughput_of_one_link, name, [])
    else:
        name = "link between nodes, Mbit/s"
        legend = _legend(looks, drawings.line, drawings.missing_mark(cells))
        figure = _multiples(cells, looks, axes.draw_throughput, name, legend)
        for ax in _first_column(figure, looks):
            ax.set_ylabel("tokens/s")
            axes.tick_throughput(ax)
    drawings.put_source(figure, cells, setting)
    return drawings.drawing(
        figure, cells, "throughput", "Throughput", setting, drawings.caption_of_throughput(cells)
    )


def _crowd_bytes(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Bytes between nodes a step, a bar a strategy."""
    name = "MB a step, busiest node"
    figure = _bars(cells, looks, axes.draw_bytes, name, drawings.least_mark(cells))
    drawings.put_source(figure, cells, setting)
    title = "Traffic between nodes"
    return drawings.drawing(
        figure, cells, "traffic", title, setting, drawings.caption_of_traffic(cells)
    )


def _crowd_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    figure = _multiples(
        cells, looks, axes.draw_loss, "optimizer step", _legend(looks, drawings.stroke)
    )
    for ax in _first_column(figure, looks):
        ax.set_ylabel("training loss")
    return drawings.drawing(
        figure, cells, "losses", "Training loss", setting, drawings.caption_of_losses(cells)
    )


def _multiples(
    cells: pd.DataFrame, looks: axes.Looks, draw_on: axes.Draw, name: str, legend: list[Line2D]
) -> Figure:
    """A row a panel, a column an engine, one scale a row."""
    panels, engines = drawings.panels_of(cells), strategies.by_engine(looks)
    rows, columns = len(panels), len(engines)
    size = WIDTH * columns, HEIGHT * rows + PITCH * len(legend) / columns + 0.7
    with drawings.canvas(*size, rows, columns, sharey="row") as (figure, grid):
        for (title, panel), row in zip(panels, grid, strict=True):
            for (engine, present), ax in zip(engines.items(), row, strict=True):
                draw_on(ax, panel[panel["strategy"].isin(present)], present)
                ax.set(title=f"{engine}\n{title.replace(chr(10), ', ')}", xlabel="")
        for ax in grid[-1]:
            ax.set_xlabel(name)
        drawings.put_legend(figure, legend, columns)
    return figure


def _first_column(figure: Figure, looks: axes.Looks) -> list[Axes]:
    return figure.axes[:: len(strategies.by_engine(looks))]


def _legend(
    looks: axes.Looks, entry: Callable[[strategies.Style], Line2D], more: Sequence[Line2D] = ()
) -> list[Line2D]:
    """A column an engine, headed by its name; blanks make the columns equally long."""
    columns = []
    for engine, present in strategies.by_engine(looks).items():
        own = [look for name, look in present.items() if strategies.engine(name) == engine]
        bold = rf"$\bf{{{engine}}}$".replace(" ", r"\ ")
        columns.append([drawings.handle(linestyle="none", label=bold), *map(entry, own)])
    columns[-1] += more
    rows = list(zip_longest(*columns))
    blank = drawings.handle(linestyle="none", label=" ")
    return [item or blank for column in zip(*rows, strict=True) for item in column]


def _bars(
    cells: pd.DataFrame, looks: axes.Looks, draw_on: axes.Draw, name: str, legend: list[Line2D]
) -> Figure:
    """Bars for each panel of the cells, tall enough for all strategies' names."""
    panels = drawings.panels_of(cells)
    columns = min(len(panels), ABREAST)
    rows = -(-len(panels) // columns)
    size = (
        WIDTH * columns + 1.6 + drawings.label_width(looks),
        rows * (PITCH * len(looks) + 0.8) + 0.7,
    )
    with _grid(panels, size, rows, columns, sharey=True) as (figure, grid):
        for (title, panel), ax in zip(panels, grid, strict=False):
            draw_on(ax, panel, looks)
            ax.set(title=title, xlabel=name)
        drawings.put_legend(figure, legend)
    return figure


#: The interval in the name of what is compared, which these axes say.
_INTERVAL = re.compile(r" τ = \d+")


def has_intervals(cells: pd.DataFrame) -> bool:
    """Whether held-out losses are known of workers that train apart for longer and for less."""
    known = cells[cells["held_out_loss"].notna() & (cells["steps_per_round"] > 1)]
    return known["steps_per_round"].nunique() > 1


def _draw_intervals(cells: pd.DataFrame, setting: str) -> drawings.Drawing:
    """A point per cell and a line through medians; a level line where each step exchanges."""
    known = cells[cells["held_out_loss"].notna()]
    known = known.assign(strategy=known["strategy"].str.replace(_INTERVAL, "", regex=True))
    looks = strategies.styles(known["strategy"])
    panels = drawings.panels_of(known)
    size = max(3.2 * len(panels), 5.0), 3.4
    with _grid(panels, size, 1, len(panels)) as (figure, grid):
        for (title, panel), ax in zip(panels, grid, strict=True):
            ax.set_title(title)
            _interval_lines(ax, panel, looks)
        grid[0].set_ylabel("held-out loss")
        drawings.put_legend(figure, [*map(drawings.line, looks.values())])
    caption = drawings.caption_of_intervals(known)
    return drawings.drawing(
        figure, cells, "intervals", "Held-out loss over the interval", setting, caption
    )


def _interval_lines(ax: Axes, panel: pd.DataFrame, looks: axes.Looks) -> None:
    for name, look in looks.items():
        own = panel[panel["strategy"] == name]
        losses = own.groupby("steps_per_round")["held_out_loss"].median()
        if list(losses.index) == [1]:
            ax.axhline(losses[1], color=look.colour, linestyle=look.dashes, linewidth=1.6)
            continue
        ax.plot(losses.index, losses, color=look.colour, linestyle=look.dashes, linewidth=1.6)
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 4.5, "linestyle": "none"}
        ax.plot(own["steps_per_round"], own["held_out_loss"], color=look.colour, **mark)
    ticks = sorted(panel.loc[panel["steps_per_round"] > 1, "steps_per_round"].unique())
    ax.set(xscale="log", xlabel="steps between two exchanges, τ")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{tick:g}" for tick in ticks])


BYTES, KEPT = "bytes_by_slot", "activation_bytes_by_slot"


@dataclass(frozen=True)
class _Panel:
    column: str
    title: str
    slots: str
    #: The cells whose level is drawn, and the column that has it.
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


def _draw_slots(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> list[drawings.Drawing]:
    """A pair of axes for what there is; no figure where no cell has slots."""
    cells = cells[cells["state"] == "ok"]
    panels = [panel for panel in _PANELS if cells[panel.column].notna().any()]
    if not panels:
        return []
    size, drawn = (max(3.4 * len(panels), 5.0), 3.4), dict[str, Line2D]()
    with _grid(panels, size, 1, len(panels)) as (figure, grid):
        for panel, ax in zip(panels, grid, strict=True):
            _slot_lines(ax, panel, cells, looks)
            having = [*cells.loc[cells[panel.column].notna(), "strategy"]]
            drawn |= {name: drawings.line(looks[name]) for name in having}
        level = drawings.handle(color=axes.SOFT, linestyle="--", linewidth=1, label="all at once")
        drawings.put_legend(figure, [*drawn.values(), level])
        drawings.put_source(figure, cells, setting)
    return [
        drawings.drawing(
            figure, cells, "slots", "Slots of a step", setting, drawings.caption_of_slots(cells)
        )
    ]


def _slot_lines(ax: Axes, panel: _Panel, cells: pd.DataFrame, looks: axes.Looks) -> None:
    for _, cell in cells[cells[panel.column].notna()].iterrows():
        values = [value / 1e6 for value in cell[panel.column]]
        look, slots = looks[cell["strategy"]], range(1, len(values) + 1)
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 5}
        ax.plot(slots, values, color=look.colour, linestyle=look.dashes, **mark)
    for level in sorted({*panel.level_of(cells)[panel.level]}):
        ax.axhline(level / 1e6, color=axes.SOFT, linestyle="--", linewidth=1)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.slots)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)


#: Phases of an iteration as fields of a measurement begin with them, in their order, and colours.
_PHASES = {"sync": "#666666", "generation": "#0072B2", "scoring": "#56B4E9", "update": "#D55E00"}
_PHASE_NAMES = {"sync": "weight sync", "scoring": "log-probabilities"}


def _draw_phases(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> list[drawings.Drawing]:
    """A row per panel: seconds and bytes of an iteration by phase, and rewards over time."""
    cells = cells[(cells["state"] == "ok") & cells["update_seconds"].notna()]
    if cells.empty:
        return []
    panels = drawings.panels_of(cells)
    size = 11.0 + drawings.label_width(looks), len(panels) * (PITCH * len(looks) + 0.9) + 0.8
    with drawings.canvas(*size, len(panels), 3) as (figure, grid):
        for (title, panel), (seconds, sent, reward) in zip(panels, grid, strict=True):
            axes.draw_phases(seconds, panel, looks, {f"{p}_seconds": c for p, c in _PHASES.items()})
            axes.draw_phases(sent, panel, looks, {f"{p}_bytes": c for p, c in _PHASES.items()}, 1e6)
            axes.draw_rewards(reward, panel, looks)
            seconds.set(title=title, xlabel="seconds per iteration")
            sent.set(xlabel="MB per iteration, busiest node", yticklabels=[])
        colours = {_PHASE_NAMES.get(name, name): colour for name, colour in _PHASES.items()}
        handles = [
            drawings.handle(color=colour, linewidth=5, label=name)
            for name, colour in colours.items()
        ]
        drawings.put_legend(figure, handles)
        drawings.put_source(figure, cells, setting)
    caption = drawings.caption_of_phases(cells)
    return [drawings.drawing(figure, cells, "phases", "Phases of an iteration", setting, caption)]
