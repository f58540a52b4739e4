"""The figure of a step's timeline: what a rank does when, of each trace a panel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import text
from analysis.figures import axes
from analysis.figures.drawings import Drawing, style
from analysis.load.traces import LANES, Lane, Phase, Step

#: Okabe and Ito's; a phase's also by lightness.
_COLOURS: dict[Phase, str] = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#E69F00",
}
#: From one lane to the next, in inches, and a panel's title and axis.
PITCH, FRAME = 0.24, 0.75
#: What a bar is drawn with at the least, as a share of the axis.
_LEAST = 0.002


def draw(steps: Sequence[Step]) -> Drawing:
    """One panel per step, one under another over the same milliseconds."""
    lanes = [lane for lane in LANES if any(s.lane == lane for step in steps for s in step.spans)]
    longest = max(step.seconds for step in steps)
    with style():
        height = len(steps) * (PITCH * len(lanes) + FRAME) + 0.4
        figure = Figure(figsize=(8.2, height), layout="constrained")
        panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
        for step, ax in zip(steps, panels, strict=True):
            _panel(ax, step, lanes, 1e3 * _LEAST * longest)
            ax.set_xlim(0, 1e3 * longest)
        panels[-1].set_xlabel("ms from the start of the step")
        handles = [Patch(color=colour, label=phase) for phase, colour in _COLOURS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    evidence = " and ".join(dict.fromkeys(step.evidence for step in steps))
    caption = f"What one rank does when, {evidence}; a bar is as long as what it stands for takes."
    return Drawing("timeline", "A step's timeline", caption, figure)


def save(drawing: Drawing, file: Path) -> None:
    """Write the picture; an SVG's text stays text, and the same steps give the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dates = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        drawing.figure.savefig(file, dpi=200, metadata=dates.get(file.suffix))


def _panel(ax: Axes, step: Step, lanes: Sequence[Lane], least: float) -> None:
    """A bar per span, at least so many milliseconds wide, so that none is too thin to be seen."""
    for at, lane in enumerate(lanes):
        for phase, colour in _COLOURS.items():
            bars = [
                (1e3 * span.start, max(1e3 * (span.end - span.start), least))
                for span in step.spans
                if (span.lane, span.phase) == (lane, phase)
            ]
            ax.broken_barh(
                bars, (at - axes.BAR / 2, axes.BAR), color=colour, edgecolor="white", linewidth=0.15
            )
    ax.set_title(f"{step.evidence}: {step.name}, {text.number(1e3 * step.seconds)} ms", loc="left")
    ax.set_yticks(range(len(lanes)), lanes)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.grid(False, axis="y")
