"""Style, panels, legend, source and captions of all figures, and how they are saved.

Figures are made without pyplot, so that nothing depends on, or changes, the caller's backend or
style.
"""

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import strategies, text
from analysis.compare.baseline import PANEL, annotated, setting_in_words, varying
from analysis.figures import axes
from analysis.load.provenance import provenance
from simulation.quantities import format_link

#: Width of a letter of a label, in inches, a little more than most have.
LETTER = 0.073
#: Lines of a legend that figures have room for, and what each further one takes, in inches.
_LEGEND_ROWS, _LEGEND_ROW = 4, 0.17
NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True)
class Drawing:
    """A figure, its file name's stem, and what to print under it."""

    name: str
    title: str
    caption: str
    figure: Figure
    #: Matrix of its cells, where that is one.
    matrix: str = ""


def drawing(
    figure: Figure,
    cells: pd.DataFrame,
    setting: str,
    what: str,
    title: str,
    *caption: str,
    source: bool = False,
) -> Drawing:
    """A finished figure with its name, full title and caption, which ends with the cells' origin.

    With ``source`` the origin is written into the figure too.
    """
    if source:
        put_source(figure, cells, setting)
    first = cells.iloc[0]
    words = [first["matrix"], first["evidence"], setting, what]
    return Drawing(
        "-".join(re.sub(r"[^\w.]+", "-", word) for word in words if word),
        ", ".join(part for part in (title, setting) if part),
        _joined(*caption, provenance(cells)),
        figure,
        str(first["matrix"]),
    )


def save(drawing: Drawing, directory: Path) -> tuple[Path, Path]:
    """Write the PNG and the SVG; the same records give the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    png, vector = (directory / f"{drawing.name}.{end}" for end in ("png", "svg"))
    drawing.figure.savefig(png, dpi=200)
    vector.write_bytes(svg(drawing))
    return png, vector


def svg(drawing: Drawing) -> bytes:
    """The drawing as SVG; the same records give the same bytes."""
    content = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": drawing.name}):
        drawing.figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


@contextmanager
def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> Iterator[tuple[Figure, Any]]:
    """Return a figure of the given size in inches, and its axes row by row.

    Small type in a font that ships with matplotlib, faint grid, no box.
    """
    style = {
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
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **shared)


def panels_of(cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Title and cells of each panel, in the table's order."""
    named = [name for name in varying(cells) if name in PANEL]
    panels = []
    for _, panel in cells.groupby(PANEL, dropna=False, sort=False):
        first = panel.iloc[0]
        title = f"{first['model']}\n{text.TUNINGS[first['tuning']]}"
        title += "".join(f", {setting_in_words(name, first[name])}" for name in named)
        panels.append((title, panel))
    return panels


def label_width(looks: axes.Looks) -> float:
    """Inches that the longest label takes beside bars, beyond those of a short one."""
    return max(0.0, LETTER * (max(len(look.label) for look in looks.values()) - 16))


def put_legend(figure: Figure, handles: Sequence[Line2D], columns: int | None = None) -> None:
    """Put a legend above the axes, by default in as many columns as the width holds.

    The figure grows by what a long legend takes, so that axes keep their height, and to the width
    of its longest line.
    """
    if not handles:
        return
    longest = max(len(str(handle.get_label())) for handle in handles)
    widest = max(1.4, 0.55 + LETTER * longest)
    figure.set_figwidth(max(figure.get_figwidth(), widest))
    fitting = int(figure.get_figwidth() / widest)
    columns = columns or min(len(handles), fitting)
    further = -(-len(handles) // columns) - _LEGEND_ROWS
    figure.set_figheight(figure.get_figheight() + max(further, 0) * _LEGEND_ROW)
    where: dict[str, Any] = {"loc": "outside upper center", "ncols": columns, "columnspacing": 1.5}
    figure.legend(handles=handles, frameon=False, **where)


def put_source(figure: Figure, cells: pd.DataFrame, setting: str) -> None:
    """Write the origin below the axes, broken between parts only; 18 characters fit an inch."""
    parts = [setting.capitalize(), provenance(cells)] if setting else [provenance(cells)]
    source = " · ".join(parts)
    unbroken = source.replace(" ", NO_BREAK).replace(f"{NO_BREAK}·{NO_BREAK}", f"{NO_BREAK}· ")
    lines = textwrap.fill(unbroken, int(18 * figure.get_figwidth()), break_on_hyphens=False)
    figure.supxlabel(lines, fontsize=6.5, color=axes.SOFT)


def handle(**look: Any) -> Line2D:
    """An entry of a legend, of this look."""
    return Line2D([], [], **look)


def line(look: strategies.Style) -> Line2D:
    """A strategy's line and marker in the legend."""
    mark: dict[str, Any] = {"marker": look.marker, "markersize": 5.5}
    return handle(color=look.colour, linestyle=look.dashes, label=look.label, **mark)


def stroke(look: strategies.Style) -> Line2D:
    """A strategy in the legend of losses, whose lines lie on one another and have no dashes."""
    return handle(color=look.colour, linewidth=2.5, label=look.label)


_MARK: dict[str, Any] = {"color": axes.INK, "mew": 1.6, "linestyle": "none"}


def least_mark(cells: pd.DataFrame) -> list[Line2D]:
    """The closed form in the legend, where it is known."""
    known = cells.loc[cells["state"] == "ok", "inter_node_bytes_closed_form"].notna().any()
    return [handle(marker="|", markersize=11, label="closed-form minimum", **_MARK)] * bool(known)


def missing_mark(cells: pd.DataFrame) -> list[Line2D]:
    """A cell without a result in the legend, where there is one."""
    lacking = (cells["state"] != "ok").any()
    return [handle(marker="x", markersize=6, label="no result", **_MARK)] * bool(lacking)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def caption_of_bytes(cells: pd.DataFrame) -> str:
    """How to read axes of bytes."""
    over = ""
    if cells["inter_bandwidth_bits_per_s"].nunique(dropna=False) > 1:
        over = f", median over the links (which differ by up to {text.percent(_spread(cells))})"
    return (
        f"10⁶ bytes that leave the busiest node in a step{over} (a logarithmic axis where the "
        f"longest bar is {axes.SEEN} times the shortest); the tick "
        "marks, where it is known, the least that the strategy's schedule must send."
    )


def caption_of_throughput(cells: pd.DataFrame) -> str:
    """How to read axes of throughput, which are bars where there is but one link."""
    timed = [len(seconds) for seconds in cells.loc[cells["state"] == "ok", "step_seconds"]]
    steps = text.one_or_range(timed, "whole")
    links = cells["inter_bandwidth_bits_per_s"]
    gains = bool(annotated(cells)["speed_up"].notna().any())
    over = (
        f"{strategies.label(strategies.SUBJECT)}'s speed-up over "
        f"{strategies.label(strategies.BASELINE)}."
    )
    references = cells.loc[cells["baseline"].map(strategies.is_ablation), "baseline"].unique()
    if len(references):
        gains = True
        over = (
            f"the speed-up over {strategies.styles(cells['strategy'])[references[0]].label}; "
            "not significant: its interval has 1 in it."
        )
    if links.nunique(dropna=False) == 1:
        return _joined(
            "tokens a second of the whole cluster, each node's egress limit being "
            f"{format_link(links.iloc[0])} (medians of {steps} steps; lines: the middle half of "
            "the rounds).",
            f"Beside the bar: {over}" if gains else "",
        )
    return _joined(
        "tokens a second of the whole cluster against each node's egress limit (medians of "
        f"{steps} steps; whiskers, where they outgrow the marker: the middle half of the rounds; "
        "both axes logarithmic).",
        "Hollow markers: the link was not shaped." if links.isna().any() else "",
        f"Above the points: {over}" if gains else "",
    )


def _spread(cells: pd.DataFrame) -> float:
    """The most by which the bytes of one bar differ between its links, over the least of them."""
    finished = cells[cells["state"] == "ok"]
    sent = finished.groupby([*PANEL, "strategy"], dropna=False)["inter_node_bytes_per_step"]
    return float((sent.max() / sent.min() - 1).max())


def caption_of_losses(cells: pd.DataFrame) -> str:
    """The content of the loss figure, and how far the strategies are apart."""
    apart = float(cells["loss_difference_max"].max())
    longest = max(map(len, cells.loc[cells["state"] == "ok", "losses"]), default=0)
    step = "each optimizer step"
    if longest > axes.MOST_STEPS:
        step = f"{axes.MOST_STEPS} optimizer steps of each line, or all if fewer, and the last"
    caption = (
        f"Mean loss over ranks and micro-batches at {step}, warm-up included; one line "
        "a cell, drawn thinner from strategy to strategy so that lines that coincide stay visible."
    )
    if math.isnan(apart):
        return caption
    return f"{caption} Largest difference to the baseline at any step of any cell: {apart:.2g}."


def caption_of_missing(cells: pd.DataFrame) -> str:
    """A sentence on the cells that have no result."""
    lacking = cells[cells["state"] != "ok"]
    if lacking.empty:
        return ""
    named = "; ".join(f"{cell['cell']} ({cell['state']})" for _, cell in lacking.iterrows())
    return f"Without a result (crosses): {named}."
