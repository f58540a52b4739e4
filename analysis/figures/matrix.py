"""Figures of the records: throughput and bytes by bandwidth, and losses by step.

Every number drawn is a value of the comparison table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import strategies
from analysis.compare.baseline import SETTINGS
from analysis.compare.varying import AXES, PANEL, in_words, varying
from analysis.figures import axes, captions, crowd, intervals, slots
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

#: Up to this many panels stand side by side; more are stacked.
WIDEST = 4
#: A matrix with more figures than this sweeps what it does not know; it is read from its table, and
#: by those who fit to it.
MOST_FIGURES = 12
#: More strategies than this are drawn in small multiples, an engine a column.
CROWD = 6


def draw(compared: pd.DataFrame) -> list[Drawing]:
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
        drawings += slots.draw(cells, present, setting)
    return drawings


def parted(compared: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str]]:
    """The cells of each figure that ran, and what sets it apart from others of its matrix."""
    ran = compared[compared["state"] != "skipped"]
    for _, matrix in ran.groupby("matrix", sort=False):
        # Of simulations, each strategy may have its own.
        mixed = matrix.groupby("comparison")["micro_batch"].nunique().max() > 1
        left = {*PANEL, *AXES, *(["micro_batch"] if mixed else [])}
        apart = [name for name in SETTINGS if name not in left]
        groups = matrix.groupby(apart, dropna=False, sort=False)
        if groups.ngroups > MOST_FIGURES:
            continue
        for _, cells in groups:
            yield cells, _setting(cells, matrix, apart)


def _draw(cells: pd.DataFrame, looks: axes.Looks, setting: str) -> list[Drawing]:
    if len(looks) > CROWD:
        drawn = [
            crowd.draw_throughput(cells, looks, setting),
            crowd.draw_bytes(cells, looks, setting),
        ]
        draw_loss = crowd.draw_losses
    else:
        drawn, draw_loss = [draw_traffic(cells, looks, setting)], draw_losses
    # A simulation has no losses.
    finished = cells[cells["state"] == "ok"]
    if finished["losses"].str.len().any():
        drawn.append(draw_loss(cells, looks, setting))
    if intervals.has_intervals(finished):
        drawn.append(intervals.draw_intervals(finished, setting))
    return drawn


def _setting(cells: pd.DataFrame, matrix: pd.DataFrame, apart: list[str]) -> str:
    """What sets this figure apart from the others of its matrix, such as ``accumulation 4``."""
    first = cells.iloc[0]
    differ = varying(matrix)
    words = [in_words(name, first[name]) for name in differ if name in apart]
    own = ["each at its own micro-batch"] if "micro_batch" in {*differ} - {*apart} else []
    return ", ".join(words + own)


def draw_traffic(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> Drawing:
    """Throughput against bandwidth, and bytes between nodes a step, a pair of axes each panel."""
    panels = panels_of(cells)
    with style():
        figure, pairs = _pairs_of_axes(len(panels), label_width(looks))
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
        put_legend(figure, [*map(line, looks.values()), *least_mark(cells), *missing_mark(cells)])
        put_source(figure, cells, setting)
    caption = captions.both(cells)
    return drawing(
        figure, cells, "traffic", "Throughput and traffic between nodes", setting, caption
    )


def draw_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    panels = panels_of(cells)
    columns = min(len(panels), WIDEST)
    rows = -(-len(panels) // columns)
    with style():
        figure = Figure(figsize=(max(2.25 * columns, 4.0), 2.1 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for (title, panel), ax in zip(panels, grid, strict=False):
            ax.set_title(title)
            axes.draw_loss(ax, panel, looks)
        for ax in grid[len(panels) :]:
            ax.set_axis_off()
        grid[0].set_ylabel("training loss")
        put_legend(figure, [stroke(look) for look in looks.values()])
    return drawing(figure, cells, "losses", "Training loss", setting, captions.losses(cells))


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
