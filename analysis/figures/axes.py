"""Lines, bars and labels in one pair of axes of a figure."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis import strategies, text
from analysis.compare.baseline import SPEED, annotated

#: Each strategy's style, in the order of drawing.
Looks = dict[str, strategies.Style]
#: Draws one panel's cells.
Draw = Callable[[Axes, pd.DataFrame, Looks], None]
#: A spread of the rounds below this share of their median would hide behind the marker.
OUTGROWS_MARKER = 0.15
#: Thickness of a bar; bars stand 1 apart.
BAR = 0.62
#: The most points of a line of losses; a figure is not wide enough to show more.
MOST_STEPS = 100
INK = "#333333"
SOFT = "#888888"
#: Ratio of the longest bar to the shortest above which a linear axis cannot be read.
SEEN = 30


def draw_throughput(ax: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    """Lines over shaped links; a link without a limit stands apart, as it has no bandwidth."""
    links = panel["inter_bandwidth_bits_per_s"]
    # In Mbit/s; the link without a limit stands well to the right of the others.
    shaped = sorted({bits / 1e6 for bits in links.dropna()})
    beyond = shaped[-1] * max(4.0, (shaped[-1] / shaped[0]) ** 0.6) if shaped else 1.0
    panel = panel.assign(place=(links / 1e6).fillna(beyond), shaped=links.notna())
    finished = panel[panel["state"] == "ok"]
    if finished["shaped"].any():
        shown = finished[finished["shaped"]]
        markers = {name: look.marker for name, look in looks.items()}
        dashes = {name: look.dashes[1] for name, look in looks.items()}
        by_style = {"style_order": list(looks), "markers": markers, "dashes": dashes}
        drawn = {"estimator": "median", "errorbar": None, "linewidth": 1.6, "ax": ax}
        options = _hues(looks) | by_style | drawn
        sns.lineplot(shown, x="place", y="tokens_per_s", style="strategy", **options)
    # Smaller from strategy to strategy: where points coincide all stay visible.
    last = max(len(looks) - 1, 1)
    sizes = {look.colour: 8.0 - 3.5 * at / last for at, look in enumerate(looks.values())}
    for line in ax.lines:
        line.set_markersize(sizes[str(line.get_color())])
    for _, cell in finished.iterrows():
        look = looks[cell["strategy"]]
        _draw_spread(ax, cell, look, sizes[look.colour], hollow=not cell["shaped"])
    ax.set(xscale="log", yscale="log", xlabel="", ylabel="")
    _tick_links(ax, shaped, [beyond] if links.isna().any() else [])
    _mark_missing(ax, panel[panel["state"] != "ok"], looks)
    _annotate_speed_up(ax, finished)
    ax.margins(y=0.18)


def _hues(looks: Looks) -> dict[str, Any]:
    """Seaborn's arguments for a colour per strategy, without its legend: figures draw their own."""
    colours = {name: look.colour for name, look in looks.items()}
    return {"hue": "strategy", "hue_order": list(looks), "palette": colours, "legend": False}


def _tick_links(ax: Axes, shaped: list[float], unshaped: list[float]) -> None:
    """A tick for each link that was run."""
    ticks = shaped + unshaped
    if shaped and unshaped:
        ax.axvline((shaped[-1] * unshaped[0]) ** 0.5, color=SOFT, ls=":", lw=0.8)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.set_xticklabels([f"{place:,g}" for place in shaped] + ["unshaped"] * len(unshaped))
    ax.xaxis.set_minor_locator(NullLocator())
    # Room for the numbers above the outermost points.
    margin = max((ticks[-1] / ticks[0]) ** 0.16, 2.0)
    ax.set_xlim(ticks[0] / margin, ticks[-1] * margin)


def tick_throughput(ax: Axes) -> None:
    """Plain numbers, closer together on a short axis; for all axes that share this one's scale."""
    low, high = ax.get_ylim()
    subs = (1.0, 2.0, 5.0) if high / low < 30 else (1.0, 3.0)
    ax.yaxis.set_major_locator(LogLocator(subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    ax.yaxis.set_minor_locator(NullLocator())


def _draw_spread(
    ax: Axes, cell: pd.Series, look: strategies.Style, size: float, hollow: bool
) -> None:
    """A whisker over the middle half of the rounds, and the hollow marker of an unshaped link."""
    if hollow:
        mark: dict[str, Any] = {"marker": look.marker, "mfc": "none", "markersize": size}
        at = [cell["place"]], [cell["tokens_per_s"]]
        ax.plot(*at, color=look.colour, linestyle="none", **mark)
    if cell["step_seconds_iqr"] > OUTGROWS_MARKER * cell["step_seconds_median"]:
        ends = [cell["tokens_per_step"] / cell[f"step_seconds_{q}"] for q in ("q3", "q1")]
        ax.plot([cell["place"]] * 2, ends, color=look.colour, linewidth=1.0)


def _mark_missing(ax: Axes, cells: pd.DataFrame, looks: Looks) -> None:
    """A cross on the axis for each cell without a result, side by side where several meet."""
    cross: dict[str, Any] = {"marker": "x", "markersize": 6, "markeredgewidth": 1.8}
    where: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "clip_on": False}
    for _, group in cells.groupby("place"):
        for at, (place, strategy) in enumerate(zip(group["place"], group["strategy"], strict=True)):
            look = cross | where | {"color": looks[strategy].colour, "linestyle": "none"}
            ax.plot([place * 1.35**at], [0.035], **look)


def _annotate_speed_up(ax: Axes, finished: pd.DataFrame) -> None:
    """The subject's speed-up over the baseline, above the highest point of each link."""
    for place, cells in finished.groupby("place"):
        speed_up = [float(annotated(cells)[name].median()) for name in SPEED]
        if math.isnan(speed_up[0]):
            continue
        ax.annotate(
            text.gain(speed_up).replace(" ", "\n"),
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


def draw_throughput_of_one_link(ax: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    """A bar per strategy; there is no second link to draw a line to."""
    finished = panel[panel["state"] == "ok"]
    _draw_bars(ax, finished, "tokens_per_s", looks)
    for place, strategy in enumerate(looks):
        cells = finished[finished["strategy"] == strategy]
        value = float(cells["tokens_per_s"].median())
        ends = [
            float(cell["tokens_per_step"] / cell[f"step_seconds_{end}"])
            for _, cell in cells.iterrows()
            for end in ("q3", "q1")
        ]
        if ends and max(ends) > 1.01 * min(ends):
            ax.plot([min(ends), max(ends)], [place] * 2, color=INK, linewidth=1.0, alpha=0.7)
        gain = _gain(cells)
        _label_bar(ax, place, max([value, *ends]), f"{text.number(value)}{gain}")
    if len(finished):
        fastest = finished["tokens_per_step"] / finished["step_seconds_q1"]
        ax.set_xlim(0, float(fastest.max()) * 1.75)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=3, prune="upper"))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _gain(cells: pd.DataFrame) -> str:
    """The label beside a bar: FCDP's gain over ZeRO-3, or any variant's over the reference."""
    compared = cells[cells["baseline"].map(strategies.is_ablation)]
    if compared.empty:
        compared = annotated(cells)
    elif (compared["baseline"] == compared["strategy"]).all():
        return "  reference"
    shown = compared[compared["speed_up"].notna()]
    if shown.empty:
        return ""
    speed_up = [float(shown[name].median()) for name in SPEED]
    return f"  {text.gain(speed_up)}"


def draw_bytes(ax: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    """A bar per strategy, the median over its links, and a mark at its closed form."""
    finished = panel[panel["state"] == "ok"]
    drawn = finished.assign(
        sent=finished["inter_node_bytes_per_step"] / 1e6,
        least=finished["inter_node_bytes_closed_form"] / 1e6,
    )
    _draw_bars(ax, drawn, "sent", looks)
    for place, strategy in enumerate(looks):
        cells = drawn[drawn["strategy"] == strategy]
        sent, least = float(cells["sent"].median()), float(cells["least"].median())
        if not math.isnan(least):
            halo = [withStroke(linewidth=3.2, foreground="white")]  # for dark bars
            ends = [place - BAR / 2, place + BAR / 2]
            ax.plot([least] * 2, ends, color=INK, linewidth=1.6, path_effects=halo)
        end = max(sent, 0.0 if math.isnan(least) else least)
        _label_bar(ax, place, end, text.number(sent, 3 if sent >= 1 else 2))
    lengths = drawn[["sent", "least"]].to_numpy()
    longest = float(drawn[["sent", "least"]].max().max())
    shortest = min(lengths[lengths > 0], default=math.inf)
    if longest > SEEN * shortest:
        ax.set(xscale="log", xlim=(shortest / 2, longest * (longest / shortest) ** 0.35))
        ax.xaxis.set_major_locator(LogLocator(numticks=5))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        ax.minorticks_off()
        return
    if longest > 0:  # on one node nothing is sent
        ax.set_xlim(0, longest * 1.28)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4, prune="upper"))


def draw_phases(
    ax: Axes, panel: pd.DataFrame, looks: Looks, colours: Mapping[str, str], unit: float = 1.0
) -> None:
    """A bar per strategy of these columns, one after the other, and their sum beside it."""
    for place, strategy in enumerate(looks):
        cells = panel[panel["strategy"] == strategy]
        end = 0.0 if len(cells) else math.nan
        for column, colour in colours.items():
            part = float(cells[column].fillna(0).median()) / unit if len(cells) else 0.0
            ax.barh(place, part, BAR, left=end, color=colour)
            end += part
        _label_bar(ax, place, end, text.number(end))
    name_bars(ax, [look.label for look in looks.values()])
    for name, look in zip(ax.get_yticklabels(), looks.values(), strict=True):
        name.set_color(look.colour)
    ax.set_xlim(0, ax.get_xlim()[1] * 1.2)


def draw_rewards(ax: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    """A line per cell: the reward of each iteration when it has ended; nothing without rewards."""
    for _, cell in panel[panel["reward"].notna()].iterrows():
        seconds = [*accumulate(cell["step_seconds"])]
        rewards = cell["rewards"][-len(seconds) :]
        ax.plot(seconds, rewards, color=looks[cell["strategy"]].colour, linewidth=1.4)
    if not ax.lines:
        ax.set_axis_off()
    ax.set(xscale="log", xlabel="seconds", ylabel="reward")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")


def _draw_bars(ax: Axes, cells: pd.DataFrame, column: str, looks: Looks) -> None:
    """A bar per strategy: the median of its cells."""
    drawn = {"estimator": "median", "errorbar": None, "saturation": 1.0, "width": BAR, "ax": ax}
    options = _hues(looks) | drawn
    sns.barplot(cells, x=column, y="strategy", order=list(looks), **options)
    ax.set(xlabel="", ylabel="")
    ax.set_yticks(range(len(looks)), [look.label for look in looks.values()])
    ax.grid(False, axis="y")


def _label_bar(ax: Axes, place: int, end: float, value: str) -> None:
    if math.isnan(end) or value == text.ABSENT:
        ax.text(0, place, "  no result", va="center", color=SOFT, fontsize=7)
        return
    write_beside(ax, place, end, value, fontsize=7.5)


def write_beside(ax: Axes, place: int, end: float, label: str, **look: Any) -> None:
    """Write to the right of where a bar ends."""
    beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    ax.annotate(label, (end, place), **beside, **look)


def name_bars(ax: Axes, names: Sequence[str]) -> None:
    """Write the bars' names beside the axis, the first on top."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(False, axis="y")


def drawn_steps(losses: Sequence[float]) -> dict[int, float]:
    """Losses by step, from 1 on: at most ``MOST_STEPS`` at even distances, and the last."""
    last = len(losses)
    stride = max(1, -(-last // MOST_STEPS))
    return {
        step: loss for step, loss in enumerate(losses, 1) if step == last or not (step - 1) % stride
    }


def draw_loss(ax: Axes, panel: pd.DataFrame, looks: Looks) -> None:
    """One line per cell."""
    finished = panel[panel["state"] == "ok"]
    rows = zip(finished["cell"], finished["strategy"], finished["losses"], strict=True)
    points = (
        (cell, strategy, step, loss)
        for cell, strategy, losses in rows
        for step, loss in drawn_steps(losses).items()
    )
    steps = pd.DataFrame(points, columns=["cell", "strategy", "step", "losses"])
    widths = {name: 5.2 - 4.0 * at / max(len(looks) - 1, 1) for at, name in enumerate(looks)}
    by_size = {"size": "strategy", "size_order": list(looks), "sizes": widths}
    options = _hues(looks) | by_size | {"units": "cell", "estimator": None, "ax": ax}
    sns.lineplot(steps, x="step", y="losses", **options)
    ax.set(xlabel="optimizer step", ylabel="")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
