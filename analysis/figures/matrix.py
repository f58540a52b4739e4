"""Figures of the records: throughput and bytes by bandwidth, losses, slots, intervals.

Every number drawn is a value of the comparison table.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
#: A matrix with more figures than this is a sweep without figures: its records are read in a table,
#: or fitted to.
MOST_FIGURES = 12
#: More strategies than this are drawn in small multiples, an engine a column.
CROWD = 6


def draw(compared: pd.DataFrame) -> list[drawings.Drawing]:
    """The figures of each matrix, kinds of evidence apart; none where no cell has a result.

    A cell that its matrix leaves out is not drawn; one that ran and has no result is.
    """
    looks = strategies.styles(compared.loc[compared["state"] != "skipped", "strategy"])
    figures = list[drawings.Drawing]()
    for cells, setting in parted(compared):
        if (cells["state"] == "ok").any():
            present = {name: look for name, look in looks.items() if name in set(cells["strategy"])}
            figures += _drawn(cells, present, setting)
    return figures


def parted(compared: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str]]:
    """The cells of each figure that ran, and the settings that set it apart in its matrix."""
    ran = compared[compared["state"] != "skipped"]
    for _, matrix in ran.groupby("matrix", sort=False):
        # In simulations each strategy may have its own micro-batch.
        mixed = matrix.groupby("comparison")["micro_batch"].nunique().max() > 1
        left = {*PANEL, *AXES, *(["micro_batch"] if mixed else [])}
        apart = [name for name in SETTINGS if name not in left]
        groups = matrix.groupby(apart, dropna=False, sort=False)
        if groups.ngroups > MOST_FIGURES:
            continue
        for _, cells in groups:
            yield cells, _setting(cells, matrix, apart)


def _drawn(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> Iterator[drawings.Drawing]:
    """All figures that these cells have values for."""
    draw_loss = draw_losses
    if len(looks) > CROWD:
        draw_loss = _crowd_losses
        yield _crowd_throughput(cells, looks, setting)
        yield _crowd_bytes(cells, looks, setting)
    else:
        yield _draw_traffic(cells, looks, setting)
    finished = cells[cells["state"] == "ok"]
    if finished["losses"].str.len().any():  # a simulation has none
        yield draw_loss(cells, looks, setting)
    if has_intervals(finished):
        yield _draw_intervals(finished, setting)
    if finished[[*_SLOTS]].notna().any(axis=None):
        yield _draw_slots(finished, looks, setting)
    if finished["update_seconds"].notna().any():
        phased = finished[finished["update_seconds"].notna()]
        yield _draw_phases(phased, looks, setting)


def _setting(cells: pd.DataFrame, matrix: pd.DataFrame, apart: list[str]) -> str:
    """Settings that set this figure apart from others of its matrix, such as ``accumulation 4``."""
    first = cells.iloc[0]
    differ = varying(matrix)
    words = [setting_in_words(name, first[name]) for name in differ if name in apart]
    words += ["each at its own micro-batch"] if "micro_batch" in {*differ} - {*apart} else []
    return ", ".join(words)


def _draw_traffic(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Throughput against bandwidth, and bytes between nodes per step: two axes per panel.

    Panels are columns while they are few, and rows otherwise.
    """
    panels, label = drawings.panels_of(cells), drawings.label_width(looks)
    links = cells["inter_bandwidth_bits_per_s"].unique()
    one_link = format_link(links[0]) if len(links) == 1 else None
    many = len(panels)
    stacked = many > WIDEST
    if stacked:
        canvas = drawings.canvas(7.5 + 2 * label, 2.0 * many + 0.6, many, 2)
    else:
        shared: dict[str, Any] = {"sharey": "row", "height_ratios": [1.5, 1]}
        canvas = drawings.canvas(max(1.95 * many + 1.1, 5.0) + label * many, 4.5, 2, many, **shared)
    with canvas as (figure, grid):
        pairs = grid if stacked else grid.T
        for (title, panel), (upper, lower) in zip(panels, pairs, strict=True):
            upper.set_title(title)
            if one_link:
                axes.draw_throughput_of_one_link(upper, panel, looks)
            else:
                axes.draw_throughput(upper, panel, looks)
            axes.draw_bytes(lower, panel, looks)
        # Labels once a row or column, not once a panel.
        for upper, lower in pairs[-1:] if stacked else pairs:
            upper.set_xlabel(f"tokens/s, {one_link}" if one_link else "link between nodes, Mbit/s")
            lower.set_xlabel("MB a step, busiest node")
        if not one_link:
            for upper, _ in pairs if stacked else pairs[:1]:
                upper.set_ylabel("tokens/s")
                axes.tick_throughput(upper)
        marks = [*drawings.least_mark(cells), *drawings.missing_mark(cells)]
        drawings.put_legend(figure, [*map(drawings.line, looks.values()), *marks])
    return drawings.drawing(
        figure,
        cells,
        setting,
        "traffic",
        "Throughput and traffic between nodes",
        f"Top: {drawings.caption_of_throughput(cells)}",
        f"Bottom: {drawings.caption_of_bytes(cells)}",
        drawings.caption_of_missing(cells),
        source=True,
    )


def draw_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
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
    caption = drawings.caption_of_losses(cells)
    return drawings.drawing(figure, cells, setting, "losses", "Training loss", caption)


@contextmanager
def _grid(
    panels: Sequence[object], size: tuple[float, float], rows: int, columns: int, **shared: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with axes for these panels; axes beyond them are hidden."""
    with drawings.canvas(*size, rows, columns, **shared) as (figure, grid):
        for ax in grid.flat[len(panels) :]:
            ax.set_axis_off()
        yield figure, [*grid.flat]


#: Width of a column and height of a row of small multiples, in inches.
WIDTH, HEIGHT = 2.7, 2.0
#: Distance from one bar to the next, in inches.
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
        names = "link between nodes, Mbit/s", "tokens/s"
        legend = _legend(looks, drawings.line, drawings.missing_mark(cells))
        figure, column = _multiples(cells, looks, axes.draw_throughput, names, legend)
        for ax in column:
            axes.tick_throughput(ax)
    caption = drawings.caption_of_throughput(cells)
    captions = caption[0].upper() + caption[1:], drawings.caption_of_missing(cells)
    named = "throughput", "Throughput"
    return drawings.drawing(figure, cells, setting, *named, *captions, source=True)


def _crowd_bytes(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Bytes between nodes per step, a bar per strategy."""
    name = "MB a step, busiest node"
    figure = _bars(cells, looks, axes.draw_bytes, name, drawings.least_mark(cells))
    captions = drawings.caption_of_bytes(cells), drawings.caption_of_missing(cells)
    named = "traffic", "Traffic between nodes"
    return drawings.drawing(figure, cells, setting, *named, *captions, source=True)


def _crowd_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    names, legend = ("optimizer step", "training loss"), _legend(looks, drawings.stroke)
    figure, _ = _multiples(cells, looks, axes.draw_loss, names, legend)
    caption = drawings.caption_of_losses(cells)
    return drawings.drawing(figure, cells, setting, "losses", "Training loss", caption)


def _multiples(
    cells: pd.DataFrame,
    looks: axes.Looks,
    draw_on: axes.Draw,
    names: tuple[str, str],
    legend: list[Line2D],
) -> tuple[Figure, Sequence[Axes]]:
    """A row per panel, a column per engine, a scale per row; and the axes of the first column."""
    panels, engines = drawings.panels_of(cells), strategies.by_engine(looks)
    rows, columns = len(panels), len(engines)
    size = WIDTH * columns, HEIGHT * rows + PITCH * len(legend) / columns + 0.7
    with drawings.canvas(*size, rows, columns, sharey="row") as (figure, grid):
        for (title, panel), row in zip(panels, grid, strict=True):
            for (engine, present), ax in zip(engines.items(), row, strict=True):
                draw_on(ax, panel[panel["strategy"].isin(present)], present)
                ax.set(title=f"{engine}\n{title.replace(chr(10), ', ')}", xlabel="")
            row[0].set_ylabel(names[1])
        for ax in grid[-1]:
            ax.set_xlabel(names[0])
        drawings.put_legend(figure, legend, columns)
    return figure, grid[:, 0]


def _legend(
    looks: axes.Looks, entry: Callable[[strategies.Style], Line2D], more: Sequence[Line2D] = ()
) -> list[Line2D]:
    """A column per engine, headed by its name; blanks make the columns equally long."""
    columns = []
    for engine, present in strategies.by_engine(looks).items():
        styles = [look for name, look in present.items() if strategies.engine(name) == engine]
        bold = rf"$\bf{{{engine}}}$".replace(" ", r"\ ")
        columns.append([drawings.handle(linestyle="none", label=bold), *map(entry, styles)])
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


#: The interval in a subject's name, which these axes show already.
_INTERVAL = re.compile(r" τ = \d+")


def has_intervals(cells: pd.DataFrame) -> bool:
    """Whether cells of local steps with held-out losses differ in their interval."""
    known = cells[cells["held_out_loss"].notna() & (cells["steps_per_round"] > 1)]
    return known["steps_per_round"].nunique() > 1


def _draw_intervals(cells: pd.DataFrame, setting: str) -> drawings.Drawing:
    """A point per cell and a line through medians; a level line where each step exchanges."""
    known = cells[cells["held_out_loss"].notna()]
    known = known.assign(strategy=known["strategy"].str.replace(_INTERVAL, "", regex=True))
    looks = strategies.styles(known["strategy"])
    panels = drawings.panels_of(known)
    with drawings.canvas(max(3.2 * len(panels), 5.0), 3.4, 1, len(panels)) as (figure, (grid,)):
        for (title, panel), ax in zip(panels, grid, strict=True):
            ax.set_title(title)
            _interval_lines(ax, panel, looks)
        grid[0].set_ylabel("held-out loss")
        drawings.put_legend(figure, [*map(drawings.line, looks.values())])
    seeds = known["seed"].nunique()
    points = f"A point per seed, of {seeds}; lines" if seeds > 1 else "Lines"
    return drawings.drawing(
        figure,
        known,
        setting,
        "intervals",
        "Held-out loss over the interval",
        "Loss of data that none trained on, after as many steps and the same batches.",
        f"{points} join medians.",
        "Level: exchanged in each step." if (known["steps_per_round"] == 1).any() else "",
    )


def _interval_lines(ax: Axes, panel: pd.DataFrame, looks: axes.Looks) -> None:
    for name, look in looks.items():
        cells = panel[panel["strategy"] == name]
        losses = cells.groupby("steps_per_round")["held_out_loss"].median()
        if list(losses.index) == [1]:
            ax.axhline(losses[1], color=look.colour, linestyle=look.dashes, linewidth=1.6)
            continue
        ax.plot(losses.index, losses, color=look.colour, linestyle=look.dashes, linewidth=1.6)
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 4.5, "linestyle": "none"}
        ax.plot(cells["steps_per_round"], cells["held_out_loss"], color=look.colour, **mark)
    ticks = sorted(panel.loc[panel["steps_per_round"] > 1, "steps_per_round"].unique())
    ax.set(xscale="log", xlabel="steps between two exchanges, τ")
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels([f"{tick:g}" for tick in ticks])


#: Columns of slots: the title of their axes, and what a slot is.
_SLOTS = {
    "bytes_by_slot": (
        "MB that a rank sends, at most",
        "slot of the rank's step: forwards, then backwards",
    ),
    "activation_bytes_by_slot": ("MB kept for backward", "slot of the step"),
}


def _draw_slots(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """Axes for each column of slots that has values."""
    columns = [column for column in _SLOTS if cells[column].notna().any()]
    drawn = dict[str, Line2D]()
    with drawings.canvas(max(3.4 * len(columns), 5.0), 3.4, 1, len(columns)) as (figure, (grid,)):
        for column, ax in zip(columns, grid, strict=True):
            having = cells[cells[column].notna()]
            at_once = having["activation_bytes_together"]
            if column == "bytes_by_slot":
                at_once = cells.loc[cells["strategy"] == "ddp", "inter_node_bytes_per_step"]
            _slot_lines(ax, having, column, sorted({*at_once}), looks)
            drawn |= {name: drawings.line(looks[name]) for name in having["strategy"]}
        level = drawings.handle(color=axes.SOFT, linestyle="--", linewidth=1, label="all at once")
        drawings.put_legend(figure, [*drawn.values(), level])
    return drawings.drawing(
        figure,
        cells,
        setting,
        "slots",
        "Slots of a step",
        "A slot is a stage's forward or backward of one micro-batch. MB: 10⁶ bytes, parameters "
        "and gradients that a rank sends in the slot, and what autograd keeps at most in it.",
        "All at once: what DDP sends in its one exchange, by its node's counter; what a step's "
        "micro-batches side by side would keep.",
        source=True,
    )


def _slot_lines(
    ax: Axes, cells: pd.DataFrame, column: str, levels: list[float], looks: axes.Looks
) -> None:
    for _, cell in cells.iterrows():
        values = [value / 1e6 for value in cell[column]]
        look, slots = looks[cell["strategy"]], range(1, len(values) + 1)
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 5}
        ax.plot(slots, values, color=look.colour, linestyle=look.dashes, **mark)
    for level in levels:
        ax.axhline(level / 1e6, color=axes.SOFT, linestyle="--", linewidth=1)
    title, slot = _SLOTS[column]
    ax.set(title=title, xlabel=slot)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)


#: Phases of an iteration as fields of a measurement begin with them, in their order: in words, and
#: their colours.
_PHASES = {
    "sync": ("weight sync", "#666666"),
    "generation": ("generation", "#0072B2"),
    "scoring": ("log-probabilities", "#56B4E9"),
    "update": ("update", "#D55E00"),
}


def _draw_phases(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> drawings.Drawing:
    """A row per panel: seconds and bytes of an iteration by phase, and any rewards over time."""
    panels = drawings.panels_of(cells)
    columns = 3 if cells["reward"].notna().any() else 2
    width = 3.7 * columns + drawings.label_width(looks)
    size = width, len(panels) * (PITCH * len(looks) + 0.9) + 0.8
    with drawings.canvas(*size, len(panels), columns) as (figure, grid):
        for (title, panel), (seconds, sent, *rewards) in zip(panels, grid, strict=True):
            for ax, of, unit in ((seconds, "seconds", 1.0), (sent, "bytes", 1e6)):
                colours = {f"{name}_{of}": colour for name, (_, colour) in _PHASES.items()}
                axes.draw_phases(ax, panel, looks, colours, unit)
            for reward in rewards:
                axes.draw_rewards(reward, panel, looks)
            seconds.set(title=title, xlabel="seconds per iteration")
            sent.set(xlabel="MB per iteration, busiest node", yticklabels=[])
        handles = [
            drawings.handle(color=colour, linewidth=5, label=words)
            for words, colour in _PHASES.values()
        ]
        drawings.put_legend(figure, handles)
    return drawings.drawing(
        figure,
        cells,
        setting,
        "phases",
        "Phases of an iteration",
        "Means per iteration: seconds of the slowest rank, and 10⁶ bytes that leave the busiest "
        "node; beside a bar all phases together. Right: the mean reward of each iteration by the "
        "time at which it had ended, in the colour of its strategy's name.",
        source=True,
    )
