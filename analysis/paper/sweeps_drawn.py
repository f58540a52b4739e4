"""Figures of the sweeps: claims over the unknown that is fitted, and where each holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import axes
from analysis.figures.drawings import NO_BREAK, Drawing, put_legend, style
from analysis.paper import words
from analysis.paper.contents import Fit
from analysis.paper.fit import Fitted
from analysis.paper.sensitivity import Setting, Sweeps

#: Colours that a colour-blind reader can tell (Okabe and Ito), and dashes beside them.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()), (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)),
    (0, (5, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (7, 2)),
)  # fmt: skip
#: Where the paper's numbers stand.
PAPER = "#7F7F7F"


def curves(name: str, claims: Sequence[str], found: Fitted, sweeps: Sweeps) -> Drawing:
    """A panel per claim: ours over the unknown, a line per assumption that is changed."""
    fit = found.fit
    settings = _shown(claims, found, sweeps)
    with style():
        figure = Figure(figsize=(max(2.5 * len(claims) + 0.6, 4.6), 3.6), layout="constrained")
        panels = figure.subplots(1, len(claims), squeeze=False)[0]
        for claim, ax in zip(claims, panels, strict=True):
            _panel(ax, claim, settings, found, sweeps)
        handles = [
            Line2D([], [], color=colour, linestyle=dash, label=_changed(fit, setting))
            for setting, colour, dash in zip(settings, COLOURS, DASHES, strict=False)
        ]
        handles.append(Line2D([], [], color=PAPER, lw=5, alpha=0.4, label="the paper's, ±15 %"))
        put_legend(figure, handles, columns=min(len(claims) + 1, 3))
    shorts = {target.claim: target.short for target in fit.targets}
    caption = (
        f"{'; '.join(shorts[claim] for claim in claims)}: simulated, over the "
        f"{fit.words[fit.unknown]}; black: "
        f"{words.setting(fit, found.assumed)}; the other lines change one of these. "
        "Grey: the paper's number and the fit's tolerance. "
        f"The upright line is the fitted {words.value(fit.unknown, found.value)}."
    )
    return Drawing(name, "The paper's numbers on our curves", caption, figure)


def _shown(claims: Sequence[str], found: Fitted, sweeps: Sweeps) -> list[Setting]:
    """What is assumed, and each change of one assumption that moves any of these claims."""
    shown = [found.assumed]
    for setting in sweeps.settings:
        if setting == found.assumed or _changed(found.fit, setting) is None:
            continue
        pairs = [
            (sweeps.curves[claim, setting].values, sweeps.curves[claim, found.assumed].values)
            for claim in claims
        ]
        if any(not np.allclose(a, b, equal_nan=True) for a, b in pairs):
            shown.append(setting)
    return shown


def _changed(fit: Fit, setting: Setting) -> str | None:
    """What a setting changes of what is assumed; ``None`` if more than one thing."""
    changed = [(name, at) for name, at in setting if fit.assumed[name] != at]
    if not changed:
        return "as assumed"
    if len(changed) > 1:
        return None
    name, at = changed[0]
    return f"{fit.words[name]} {words.value(name, at)}"


def _panel(
    ax: Axes, claim: str, settings: Sequence[Setting], found: Fitted, sweeps: Sweeps
) -> None:
    drawn = [sweeps.curves[claim, setting] for setting in settings]
    number, tolerance = drawn[0].claim.number, found.fit.tolerance
    assert number is not None, "a claim without a number has no curve"
    ax.axhspan(number * (1 - tolerance), number * (1 + tolerance), color=PAPER, alpha=0.25, lw=0)
    ax.axhline(number, color=PAPER, lw=1.2)
    ax.axvline(100 * found.value, color=axes.SOFT, lw=0.8)
    for curve, colour, dash in zip(drawn, COLOURS, DASHES, strict=False):
        ax.plot(100 * sweeps.grid, curve.values, color=colour, linestyle=dash, lw=1.4)
    ax.set_title("\n".join(_folded(drawn[0].target.short)))
    ax.set_xlabel("share of 100 Gbit/s reached, %")
    unit = drawn[0].claim.unit
    ax.set_ylabel("× as fast" if unit == "×" else f"{unit}")
    ax.set_ylim(bottom=0)


def _folded(title: str) -> list[str]:
    words_of = title.replace(" %", f"{NO_BREAK}%").split(" ")
    half = (len(words_of) + 1) // 2
    return [" ".join(words_of[:half]), " ".join(words_of[half:])]


def regions(found: Fitted, sweeps: Sweeps) -> Drawing:
    """Where each claim holds: a panel per length and recomputation, a colour per micro-batch."""
    fit = found.fit
    assumed = dict(found.assumed)
    there = [s for s in sweeps.settings if dict(s)["slow_share"] == assumed["slow_share"]]
    rows, columns, batches = (
        sorted({dict(s)[name] for s in there})
        for name in ("recomputed", "sequence_length", "micro_batch")
    )
    with style():
        size = (2.1 * len(columns) + 2.6, 1.75 * len(rows) + 0.9)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
        for setting in there:
            of = dict(setting)
            at = rows.index(of["recomputed"]), columns.index(of["sequence_length"])
            _bars(grid[at], batches.index(of["micro_batch"]), setting, found, sweeps)
            grid[at].set_title(
                f"{of['sequence_length']:g} tokens, {words.value('recomputed', of['recomputed'])}"
                " recomputed"
            )
        for ax in grid[-1]:
            ax.set_xlabel("share of 100 Gbit/s reached, %")
        handles = [
            Line2D([], [], color=COLOURS[at + 1], lw=4, label=f"micro-batch of LoRA {batch:g}")
            for at, batch in enumerate(batches)
        ]
        put_legend(figure, handles)
    caption = (
        f"Where each number of the paper holds within {100 * fit.tolerance:g} %, simulated. A "
        "setting that explains the paper is an upright line that crosses a bar of one "
        "colour in every row. "
        f"Of 1 Gbit/s {words.value('slow_share', assumed['slow_share'])} is reached."
    )
    return Drawing("paper-regions", "Settings that satisfy each number", caption, figure)


def _bars(ax: Axes, batch: int, setting: Setting, found: Fitted, sweeps: Sweeps) -> None:
    targets = found.fit.targets
    for row, target in enumerate(targets):
        holds = sweeps.curves[target.claim, setting].holds
        place = row + (batch - 0.5) * 0.36
        shown = np.where(holds, place, np.nan)
        colour = COLOURS[batch + 1]
        ax.plot(100 * sweeps.grid, shown, color=colour, lw=4, solid_capstyle="butt")
    ax.set_yticks(range(len(targets)), [target.short for target in targets], fontsize=6.5)
    ax.set_ylim(len(targets) - 0.5, -0.5)
    ax.set_xlim(100 * sweeps.grid[0], 100 * sweeps.grid[-1])
