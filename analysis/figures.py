"""Figures of the records: throughput and bytes by bandwidth, and losses by step.

Every number drawn is a value of the comparison table. Figures are made without pyplot, so that
nothing depends on, or changes, the caller's backend or style.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import axes, captions, strategies, text
from analysis.comparison import PANEL, SETTINGS
from analysis.provenance import provenance
from analysis.tables import OPTIONAL, varying

#: A figure shows the cells that agree in all settings but those of its panels, link and seed.
FIGURE = [name for name in SETTINGS if name not in (*PANEL, "inter_bandwidth_bits_per_s", "seed")]
#: Up to this many panels stand side by side; more are stacked.
WIDEST = 4
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Drawing:
    """A figure, its file name's stem, and what to print under it."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Saved:
    """Where a drawing went."""

    drawing: Drawing
    png: Path
    svg: Path


def draw(compared: pd.DataFrame) -> list[Drawing]:
    """The figures of each matrix, kinds of evidence apart; none where no cell has a result.

    A cell that its matrix leaves out is not drawn; one that ran and has no result is.
    """
    ran = compared[compared["state"] != "skipped"]
    looks = strategies.styles(ran["strategy"])
    drawings = []
    for _, cells in ran.groupby(FIGURE, dropna=False, sort=False):
        if (cells["state"] != "ok").all():
            continue
        present = {name: look for name, look in looks.items() if name in set(cells["strategy"])}
        setting = _setting(cells, ran[ran["matrix"] == cells["matrix"].iloc[0]])
        drawings += [draw_traffic(cells, present, setting), draw_losses(cells, present, setting)]
    return drawings


def _setting(cells: pd.DataFrame, matrix: pd.DataFrame) -> str:
    """What sets this figure apart from the others of its matrix, such as ``accumulation 4``."""
    first = cells.iloc[0]
    apart = [name for name in varying(matrix) if name in FIGURE]
    return ", ".join(f"{OPTIONAL[name].lower()} {first[name]}" for name in apart)


def _name(cells: pd.DataFrame, setting: str, what: str) -> str:
    """The stem of a figure's file name."""
    first = cells.iloc[0]
    words = [first["matrix"], first["evidence"], setting, what]
    return "-".join(re.sub(r"[^\w.]+", "-", word) for word in words if word)


def draw_traffic(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> Drawing:
    """Throughput against bandwidth, and bytes between nodes a step, a pair of axes each panel."""
    panels = _panels(cells)
    with _style():
        figure, pairs = _pairs_of_axes(len(panels))
        links = cells["inter_bandwidth_bits_per_s"].unique()
        one_link = text.link(links[0]) if len(links) == 1 else None
        for (title, panel), (upper, lower) in zip(panels, pairs, strict=True):
            upper.set_title(title)
            if one_link:
                axes.draw_throughput_of_one_link(upper, panel, looks)
            else:
                axes.draw_throughput(upper, panel, looks)
            axes.draw_bytes(lower, panel, looks)
        _name_outer_axes(pairs, len(panels) <= WIDEST, one_link)
        _put_legend(figure, _handles(cells, looks))
        source = [setting.capitalize(), provenance(cells)] if setting else [provenance(cells)]
        _put_source(figure, " · ".join(source))
    title = ", ".join(part for part in ("Throughput and traffic between nodes", setting) if part)
    return Drawing(_name(cells, setting, "traffic"), title, captions.traffic(cells), figure)


def draw_losses(cells: pd.DataFrame, looks: axes.Looks, setting: str = "") -> Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    panels = _panels(cells)
    columns = min(len(panels), WIDEST)
    rows = -(-len(panels) // columns)
    with _style():
        figure = Figure(figsize=(max(2.25 * columns, 4.0), 2.1 * rows + 0.6), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for (title, panel), ax in zip(panels, grid, strict=False):
            ax.set_title(title)
            axes.draw_loss(ax, panel, looks)
        for ax in grid[len(panels) :]:
            ax.set_axis_off()
        grid[0].set_ylabel("training loss")
        handles = [Line2D([], [], color=look.colour, label=look.label) for look in looks.values()]
        _put_legend(figure, handles)
    title = ", ".join(part for part in ("Training loss", setting) if part)
    return Drawing(_name(cells, setting, "losses"), title, captions.losses(cells), figure)


def save(drawing: Drawing, directory: Path) -> Saved:
    """Write the PNG and the SVG; the same records give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    saved = Saved(drawing, *(directory / f"{drawing.name}.{end}" for end in ("png", "svg")))
    drawing.figure.savefig(saved.png, dpi=200)
    saved.svg.write_bytes(svg(drawing))
    return saved


def svg(drawing: Drawing) -> bytes:
    """The drawing as SVG; the same records give the same bytes."""
    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _put_legend(figure: Figure, handles: list[Line2D]) -> None:
    """Above the axes, in as many columns as the width holds (about 1.4 inches an entry)."""
    columns = max(int(figure.get_figwidth() / 1.4), 1)
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=min(len(handles), columns),
        columnspacing=1.5,
        frameon=False,
    )


def _put_source(figure: Figure, source: str) -> None:
    """Below the axes, broken between parts only; about 18 characters of this size fit an inch."""
    unbroken = source.replace(" ", NO_BREAK).replace(f"{NO_BREAK}·{NO_BREAK}", f"{NO_BREAK}· ")
    lines = textwrap.fill(unbroken, int(18 * figure.get_figwidth()), break_on_hyphens=False)
    figure.supxlabel(lines, fontsize=6.5, color=axes.SOFT)


@contextmanager
def _style() -> Iterator[None]:
    """Small type in a font that ships with matplotlib, faint grid, no box."""
    settings = {
        **sns.axes_style("whitegrid"),
        **sns.plotting_context("paper", font_scale=0.9),
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 8.5,
        "axes.edgecolor": "#BBBBBB",
        "grid.color": "#E6E6E6",
        "text.color": axes.INK,
        "axes.labelcolor": axes.INK,
        "xtick.color": axes.INK,
        "ytick.color": axes.INK,
    }
    with mpl.rc_context(settings):
        yield


def _panels(cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Title and cells of each panel, in the table's order."""
    named = [name for name in varying(cells) if name in PANEL and name != "matrix"]
    panels = []
    for _, panel in cells.groupby(PANEL, dropna=False, sort=False):
        first = panel.iloc[0]
        title = f"{first['model']}\n{text.TUNINGS[first['tuning']]}"
        title += "".join(f", {OPTIONAL[name].lower()} {first[name]}" for name in named)
        panels.append((title, panel))
    return panels


def _pairs_of_axes(panels: int) -> tuple[Figure, list[tuple[Axes, Axes]]]:
    """Panels as columns while they are few, as rows otherwise."""
    if panels <= WIDEST:
        size = (max(1.95 * panels + 1.1, 5.0), 4.5)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(2, panels, sharey="row", squeeze=False, height_ratios=[1.5, 1])
        return figure, [(grid[0, at], grid[1, at]) for at in range(panels)]
    figure = Figure(figsize=(7.5, 2.0 * panels + 0.6), layout="constrained")
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


def _handles(cells: pd.DataFrame, looks: axes.Looks) -> list[Line2D]:
    """The legend: strategies in their order, then what the other marks mean."""
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, markersize=5.5, label=look.label)
        for look in looks.values()
    ]
    finished = cells[cells["state"] == "ok"]
    if finished["inter_node_bytes_closed_form"].notna().any():
        handles.append(_mark("|", "closed-form minimum", size=11))
    if len(finished) < len(cells):
        handles.append(_mark("x", "no result", size=6))
    return handles


def _mark(marker: str, label: str, size: float) -> Line2D:
    return Line2D(
        [],
        [],
        color=axes.INK,
        marker=marker,
        markersize=size,
        mew=1.6,
        linestyle="none",
        label=label,
    )
