"""Figures of the records: throughput and bytes by bandwidth, and losses by step.

Every number drawn is a value of the comparison table. Figures are made without pyplot, so that
nothing depends on, or changes, the caller's backend or style.
"""

from __future__ import annotations

import math
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
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis import strategies, text
from analysis.comparison import SETTINGS
from analysis.provenance import provenance
from analysis.tables import OPTIONAL, varying

#: A panel shows the cells that differ in nothing but strategy, link and seed.
PANEL = [name for name in SETTINGS if name not in ("inter_bandwidth_bits_per_s", "seed")]
#: Up to this many panels stand side by side; more are stacked.
WIDEST = 4
#: A spread of the steps below this share of their median would hide behind the marker.
OUTGROWS_MARKER = 0.15
#: Thickness of a bar; bars stand 1 apart.
BAR = 0.62
INK = "#333333"
SOFT = "#888888"


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
    """The figures of each matrix, kinds of evidence apart; none where no cell has a result."""
    drawings = []
    for (matrix, evidence), cells in compared.groupby(["matrix", "evidence"], sort=True):
        if (cells["state"] != "ok").all():
            continue
        stem = f"{matrix}-{evidence}"
        drawings += [draw_traffic(cells, f"{stem}-traffic"), draw_losses(cells, f"{stem}-losses")]
    return drawings


def draw_traffic(cells: pd.DataFrame, name: str) -> Drawing:
    """Throughput against bandwidth, and bytes between nodes a step, a pair of axes each panel."""
    panels = _panels(cells)
    looks = strategies.styles(cells["strategy"])
    with _style():
        figure, pairs = _pairs_of_axes(len(panels))
        for (title, panel), (upper, lower) in zip(panels, pairs, strict=True):
            upper.set_title(title)
            _draw_throughput(upper, panel, looks)
            _draw_bytes(lower, panel, looks)
        _name_outer_axes(pairs, len(panels) <= WIDEST)
        _put_legend(figure, _handles(cells, looks))
        # About 18 characters of this size fit an inch.
        source = textwrap.fill(provenance(cells), int(18 * figure.get_figwidth()))
        figure.supxlabel(source, fontsize=6.5, color=SOFT)
    return Drawing(name, "Throughput and traffic between nodes", _traffic_caption(cells), figure)


def draw_losses(cells: pd.DataFrame, name: str) -> Drawing:
    """Loss by step; lines grow thinner, so that strategies that coincide all stay visible."""
    panels = _panels(cells)
    looks = strategies.styles(cells["strategy"])
    columns = min(len(panels), WIDEST)
    rows = -(-len(panels) // columns)
    with _style():
        figure = Figure(figsize=(max(2.25 * columns, 4.0), 2.1 * rows + 0.6), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for (title, panel), ax in zip(panels, axes, strict=False):
            ax.set_title(title)
            _draw_loss(ax, panel, looks)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        axes[0].set_ylabel("training loss")
        handles = [Line2D([], [], color=look.colour, label=look.label) for look in looks.values()]
        _put_legend(figure, handles)
    return Drawing(name, "Training loss", _loss_caption(cells), figure)


def save(drawing: Drawing, directory: Path) -> Saved:
    """Write the PNG and the SVG; the same records give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    png, svg = (directory / f"{drawing.name}.{suffix}" for suffix in ("png", "svg"))
    with mpl.rc_context({"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(png, dpi=200)
        drawing.figure.savefig(svg, metadata={"Date": None})
    return Saved(drawing, png, svg)


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
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
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


def _name_outer_axes(pairs: list[tuple[Axes, Axes]], columns: bool) -> None:
    """Axis labels once a row or column, not once a panel."""
    for at, (upper, lower) in enumerate(pairs):
        if columns or at == len(pairs) - 1:
            upper.set_xlabel("link between nodes, Mbit/s")
            lower.set_xlabel("MB a step, busiest node")
        if not columns or at == 0:
            upper.set_ylabel("tokens/s")
            _tick_throughput(upper)


def _draw_throughput(ax: Axes, panel: pd.DataFrame, looks: dict[str, strategies.Style]) -> None:
    """Lines over shaped links; a link without a limit stands apart, as it has no bandwidth."""
    places = _places(panel)
    panel = panel.assign(
        place=panel["inter_bandwidth_bits_per_s"].map(places.at),
        shaped=panel["inter_bandwidth_bits_per_s"].notna(),
    )
    finished = panel[panel["state"] == "ok"]
    if finished["shaped"].any():
        sns.lineplot(
            finished[finished["shaped"]],
            x="place",
            y="tokens_per_s",
            hue="strategy",
            hue_order=list(looks),
            palette={name: look.colour for name, look in looks.items()},
            style="strategy",
            style_order=list(looks),
            markers={name: look.marker for name, look in looks.items()},
            dashes=False,
            estimator="median",
            errorbar=None,
            legend=False,
            linewidth=1.6,
            markersize=5.5,
            ax=ax,
        )
    for _, cell in finished.iterrows():
        _draw_spread(ax, cell, looks[cell["strategy"]], hollow=not cell["shaped"])
    ax.set(xscale="log", yscale="log", xlabel="", ylabel="")
    _tick_links(ax, places)
    _mark_missing(ax, panel[panel["state"] != "ok"], looks)
    _annotate_speed_up(ax, finished)
    ax.margins(y=0.18)


@dataclass(frozen=True)
class _Places:
    """Where each link of a panel stands on the x axis, in Mbit/s."""

    shaped: list[float]
    #: Right of the fastest shaped link; ``None`` where every link is shaped.
    unshaped: float | None

    def at(self, bits_per_s: float) -> float:
        """The place of one link."""
        if self.unshaped is not None and math.isnan(bits_per_s):
            return self.unshaped
        return bits_per_s / 1e6


def _places(panel: pd.DataFrame) -> _Places:
    """The panel's links, the unshaped one a fair step to the right of the others."""
    links = panel["inter_bandwidth_bits_per_s"]
    shaped = sorted({bits / 1e6 for bits in links.dropna()})
    if links.notna().all():
        return _Places(shaped, None)
    if not shaped:
        return _Places(shaped, 1.0)
    return _Places(shaped, shaped[-1] * max(4.0, (shaped[-1] / shaped[0]) ** 0.6))


def _tick_links(ax: Axes, places: _Places) -> None:
    """A tick for each link that was run."""
    ticks, names = list(places.shaped), [f"{place:g}" for place in places.shaped]
    if places.unshaped is not None:
        ticks.append(places.unshaped)
        names.append("unshaped")
        if places.shaped:
            ax.axvline((places.shaped[-1] * places.unshaped) ** 0.5, color=SOFT, ls=":", lw=0.8)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.set_xticklabels(names)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(ticks[0] / 2.5, ticks[-1] * 2.5)


def _tick_throughput(ax: Axes) -> None:
    """Plain numbers, closer together on a short axis; for all axes that share this one's scale."""
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 30 else (1.0, 3.0)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _draw_spread(ax: Axes, cell: pd.Series, look: strategies.Style, hollow: bool) -> None:
    """The middle half of the steps; on an unshaped link the marker too, which has no line."""
    if hollow:
        ax.plot(
            [cell["place"]],
            [cell["tokens_per_s"]],
            color=look.colour,
            marker=look.marker,
            markerfacecolor="none",
            markersize=5.5,
            linestyle="none",
        )
    if cell["step_seconds_iqr"] > OUTGROWS_MARKER * cell["step_seconds_median"]:
        ends = [cell["tokens_per_step"] / cell[f"step_seconds_{q}"] for q in ("q3", "q1")]
        ax.plot([cell["place"]] * 2, ends, color=look.colour, linewidth=1.0)


def _mark_missing(ax: Axes, cells: pd.DataFrame, looks: dict[str, strategies.Style]) -> None:
    """A cross on the axis for each cell without a result, side by side where several meet."""
    for _, group in cells.groupby("place"):
        for at, (place, strategy) in enumerate(zip(group["place"], group["strategy"], strict=True)):
            ax.plot(
                [place * 1.35**at],
                [0.035],
                marker="x",
                color=looks[strategy].colour,
                markersize=6,
                markeredgewidth=1.8,
                linestyle="none",
                transform=ax.get_xaxis_transform(),
                clip_on=False,
            )


def _annotate_speed_up(ax: Axes, finished: pd.DataFrame) -> None:
    """The subject's speed-up over the baseline, above the highest point of each link."""
    for place, cells in finished.groupby("place"):
        speed_up = float(_annotated(cells)["speed_up"].median())
        if math.isnan(speed_up):
            continue
        ax.annotate(
            text.times(speed_up),
            (place, cells["tokens_per_s"].max()),
            # Left of the middle, so that a rising line passes by; the halo is for the grid.
            xytext=(-4, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            fontweight="bold",
            color=strategies.styles([strategies.SUBJECT])[strategies.SUBJECT].colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )


def _annotated(cells: pd.DataFrame) -> pd.DataFrame:
    """The subject's cells whose speed-up a figure states: over the default baseline only."""
    subject = cells["strategy"] == strategies.SUBJECT
    annotated: pd.DataFrame = cells[subject & (cells["baseline"] == strategies.BASELINE)]
    return annotated


def _draw_bytes(ax: Axes, panel: pd.DataFrame, looks: dict[str, strategies.Style]) -> None:
    """A bar a strategy, the median over its links, and its closed form."""
    finished = panel[panel["state"] == "ok"]
    drawn = finished.assign(
        sent=finished["inter_node_bytes_per_step"] / 1e6,
        least=finished["inter_node_bytes_closed_form"] / 1e6,
    )
    sns.barplot(
        drawn,
        x="sent",
        y="strategy",
        order=list(looks),
        hue="strategy",
        hue_order=list(looks),
        palette={name: look.colour for name, look in looks.items()},
        estimator="median",
        errorbar=None,
        saturation=1.0,
        legend=False,
        width=BAR,
        ax=ax,
    )
    for place, strategy in enumerate(looks):
        _label_bar(ax, place, drawn[drawn["strategy"] == strategy])
    ax.set(xlabel="", ylabel="")
    ax.set_yticks(range(len(looks)), [look.label for look in looks.values()])
    ax.grid(False, axis="y")
    ax.set_xlim(0, float(drawn[["sent", "least"]].max().max()) * 1.28)


def _label_bar(ax: Axes, place: int, cells: pd.DataFrame) -> None:
    """The bar's value at its end, and a tick where the closed-form minimum stands."""
    if cells.empty:
        ax.text(0, place, "  no result", va="center", color=SOFT, fontsize=7)
        return
    least, sent = float(cells["least"].median()), float(cells["sent"].median())
    if not math.isnan(least):
        ax.plot([least] * 2, [place - BAR / 2, place + BAR / 2], color=INK, linewidth=1.6)
    end = cells[["sent", "least"]].max().max()
    ax.annotate(
        text.number(sent, 3 if sent >= 1 else 2),
        (end, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
    )


def _draw_loss(ax: Axes, panel: pd.DataFrame, looks: dict[str, strategies.Style]) -> None:
    """One line a cell."""
    finished = panel[panel["state"] == "ok"]
    steps = finished[["cell", "strategy", "losses"]].explode("losses").astype({"losses": float})
    steps["step"] = steps.groupby("cell").cumcount() + 1
    widths = {name: 5.2 - 4.0 * at / max(len(looks) - 1, 1) for at, name in enumerate(looks)}
    sns.lineplot(
        steps,
        x="step",
        y="losses",
        hue="strategy",
        hue_order=list(looks),
        palette={name: look.colour for name, look in looks.items()},
        size="strategy",
        size_order=list(looks),
        sizes=widths,
        units="cell",
        estimator=None,
        legend=False,
        ax=ax,
    )
    ax.set(xlabel="optimizer step", ylabel="")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _handles(cells: pd.DataFrame, looks: dict[str, strategies.Style]) -> list[Line2D]:
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
        [], [], color=INK, marker=marker, markersize=size, mew=1.6, linestyle="none", label=label
    )


def _traffic_caption(cells: pd.DataFrame) -> str:
    """How to read the traffic figure, and how its numbers were obtained."""
    unshaped = cells["inter_bandwidth_bits_per_s"].isna().any()
    parts = [
        "Top: tokens a second of the whole cluster against each node's egress limit (medians; "
        "whiskers, where they outgrow the marker: the middle half of the steps; both axes "
        "logarithmic).",
        "Hollow markers: the link was not shaped." if unshaped else "",
        f"Figures above the points: {strategies.label(strategies.SUBJECT)}'s speed-up over "
        f"{strategies.label(strategies.BASELINE)}."
        if _annotated(cells)["speed_up"].notna().any()
        else "",
        "Bottom: 10^6 bytes that leave the busiest node in a step, median over the links (which "
        f"differ by up to {text.percent(_spread(cells))}); the tick marks the least that the "
        "strategy's schedule must send.",
        _missing(cells),
        provenance(cells),
    ]
    return " ".join(part for part in parts if part)


def _spread(cells: pd.DataFrame) -> float:
    """The most by which the bytes of one bar differ between its links, over the least of them."""
    finished = cells[cells["state"] == "ok"]
    sent = finished.groupby([*PANEL, "strategy"], dropna=False)["inter_node_bytes_per_step"]
    return float((sent.max() / sent.min() - 1).max())


def _loss_caption(cells: pd.DataFrame) -> str:
    """What the loss figure shows, and how far the strategies are apart."""
    apart = float(cells["loss_difference_max"].max())
    parts = [
        "Mean loss over ranks and micro-batches at each optimizer step, warm-up included; one line "
        "a cell, drawn thinner from strategy to strategy so that lines that coincide stay visible.",
        f"Largest difference to the baseline at any step of any cell: {apart:.2g}."
        if not math.isnan(apart)
        else "",
        provenance(cells),
    ]
    return " ".join(part for part in parts if part)


def _missing(cells: pd.DataFrame) -> str:
    """Which cells the figure lacks."""
    lacking = cells[cells["state"] != "ok"]
    if lacking.empty:
        return ""
    named = "; ".join(f"{cell['cell']} ({cell['state']})" for _, cell in lacking.iterrows())
    return f"Without a result (crosses): {named}."
