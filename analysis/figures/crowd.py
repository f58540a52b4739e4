"""Figures of more strategies than one pair of axes can hold: small multiples, an engine a column.

The baseline and the subject stand in every column, so that each engine's strategies are seen next
to both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import strategies
from analysis.figures import axes, captions
from analysis.figures.drawings import (
    Drawing,
    drawing,
    label_width,
    least_mark,
    line,
    missing_mark,
    panels_of,
    put_legend,
    put_source,
    stroke,
    style,
)
from simulation.quantities import format_link

#: Width of a column and height of a row of small multiples, in inches.
WIDTH, HEIGHT = 2.7, 2.0
#: From one bar to the next, in inches.
PITCH = 0.19
#: Up to this many panels of bars stand side by side.
ABREAST = 3


def draw_throughput(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> Drawing:
    """Lines over the links, or bars where there is but one."""
    links = cells["inter_bandwidth_bits_per_s"].unique()
    if len(links) == 1:
        name = f"tokens/s, {format_link(links[0])}"
        figure = _bars(cells, looks, axes.draw_throughput_of_one_link, name, [])
    else:
        name = "link between nodes, Mbit/s"
        legend = _legend(looks, line, missing_mark(cells))
        figure = _multiples(cells, looks, axes.draw_throughput, name, legend)
        for ax in _first_column(figure, looks):
            ax.set_ylabel("tokens/s")
            axes.tick_throughput(ax)
    put_source(figure, cells, setting)
    return drawing(figure, cells, "throughput", "Throughput", setting, captions.throughput(cells))


def draw_bytes(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> Drawing:
    """Bytes between nodes a step, a bar a strategy."""
    name = "MB a step, busiest node"
    figure = _bars(cells, looks, axes.draw_bytes, name, least_mark(cells))
    put_source(figure, cells, setting)
    title = "Traffic between nodes"
    return drawing(figure, cells, "traffic", title, setting, captions.traffic(cells))


def draw_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    figure = _multiples(cells, looks, axes.draw_loss, "optimizer step", _legend(looks, stroke))
    for ax in _first_column(figure, looks):
        ax.set_ylabel("training loss")
    return drawing(figure, cells, "losses", "Training loss", setting, captions.losses(cells))


def _multiples(
    cells: pd.DataFrame, looks: axes.Looks, draw_on: axes.Draw, name: str, legend: list[Line2D]
) -> Figure:
    """A row a panel, a column an engine, one scale a row."""
    panels, engines = panels_of(cells), strategies.by_engine(looks)
    rows, columns = len(panels), len(engines)
    size = (WIDTH * columns, HEIGHT * rows + PITCH * len(legend) / columns + 0.7)
    with style():
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, sharey="row", squeeze=False)
        for (title, panel), row in zip(panels, grid, strict=True):
            for (engine, present), ax in zip(engines.items(), row, strict=True):
                draw_on(ax, panel[panel["strategy"].isin(present)], present)
                ax.set(title=f"{engine}\n{title.replace(chr(10), ', ')}", xlabel="")
        for ax in grid[-1]:
            ax.set_xlabel(name)
        put_legend(figure, legend, columns)
    return figure


def _first_column(figure: Figure, looks: axes.Looks) -> list[Axes]:
    return figure.axes[:: len(strategies.by_engine(looks))]


def _legend(
    looks: axes.Looks,
    handle: Callable[[strategies.Style], Line2D],
    more: Sequence[Line2D] = (),
) -> list[Line2D]:
    """A column an engine, headed by its name; blanks make the columns equally long."""
    columns = []
    for engine, present in strategies.by_engine(looks).items():
        own = [look for name, look in present.items() if strategies.engine(name) == engine]
        columns.append([_blank(_bold(engine)), *map(handle, own)])
    columns[-1] += more
    rows = list(zip_longest(*columns))
    return [item or _blank(" ") for column in zip(*rows, strict=True) for item in column]


def _bold(words: str) -> str:
    return rf"$\bf{{{words}}}$".replace(" ", r"\ ")


def _blank(label: str) -> Line2D:
    """A line of the legend without a line."""
    return Line2D([], [], linestyle="none", label=label)


def _bars(
    cells: pd.DataFrame, looks: axes.Looks, draw_on: axes.Draw, name: str, legend: list[Line2D]
) -> Figure:
    """Bars for each panel of the cells, tall enough for all strategies' names."""
    panels = panels_of(cells)
    columns = min(len(panels), ABREAST)
    rows = -(-len(panels) // columns)
    size = (WIDTH * columns + 1.6 + label_width(looks), rows * (PITCH * len(looks) + 0.8) + 0.7)
    with style():
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
        for (title, panel), ax in zip(panels, grid, strict=False):
            draw_on(ax, panel, looks)
            ax.set(title=title, xlabel=name)
        for ax in grid[len(panels) :]:
            ax.set_axis_off()
        put_legend(figure, legend)
    return figure
