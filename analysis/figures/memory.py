"""The figure of the study of memory: the largest micro-batch that fits."""

from __future__ import annotations

from itertools import product
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import strategies, text
from analysis.figures import axes
from analysis.figures.drawings import Drawing, style
from analysis.load.memory import MemoryStudy
from simulation.imitated.records import MemoryRecord
from simulation.transformer import Tuning

#: Width of a panel, and from one bar to the next, in inches.
WIDTH, PITCH = 1.9, 0.19


def draw(study: MemoryStudy) -> Drawing:
    """The largest micro-batch of each strategy: rows by length and model, columns by tuning."""
    models = sorted({_model(record) for record in study.records})
    kinds = list(product(get_args(Tuning), (False, True)))
    names = strategies.ordered(record.case.strategy for record in study.records)
    labels = sorted(
        {(names.index(r.case.strategy), r.case.label, r.case.strategy) for r in study.records}
    )
    height = len(models) * (PITCH * len(labels) + 0.7)
    with style():
        figure = Figure(figsize=(WIDTH * len(kinds) + 1.4, height), layout="constrained")
        grid = figure.subplots(len(models), len(kinds), sharey=True, sharex=True, squeeze=False)
        for (at, (tuning, again)), ax in zip(product(models, kinds), grid.flat, strict=True):
            found = {
                record.case.label: record
                for record in study.records
                if (_model(record), record.case.tuning, record.case.checkpointing)
                == (at, tuning, again)
            }
            how = ", checkpointing" if again else ""
            length, model = at
            ax.set_title(f"{model}, {length:,} tokens\n{text.TUNINGS[tuning]}{how}")
            _draw_bars(ax, [(label, name, found.get(label)) for _, label, name in labels])
        for ax in grid[-1]:
            ax.set_xlabel("largest micro-batch")
    caption = (
        "Sequences a rank in the largest step that fits; 0: not one does. "
        f"{study.summary} Forward, backward and optimizer step are the real code, on tensors "
        "without contents."
    )
    return Drawing("memory-largest-micro-batch", "Largest micro-batch that fits", caption, figure)


def _model(record: MemoryRecord) -> tuple[int, str]:
    """What a row of panels is of: tokens per sequence, and the model."""
    return record.case.sequence_length, record.case.model.name


def _draw_bars(ax: Axes, cases: list[tuple[str, str, MemoryRecord | None]]) -> None:
    """A bar a case, with its value or what became of it."""
    looks = strategies.styles(name for _, name, _ in cases)
    for at, (_, name, record) in enumerate(cases):
        finding = None if record is None else record.finding
        size = 0 if finding is None else finding.largest_micro_batch
        ax.barh(at, size, axes.BAR, color=looks[name].colour)
        said = f"{size}" if finding else "–" if record is None else record.state
        colour = axes.INK if finding else axes.SOFT
        ax.annotate(
            said, (size, at), xytext=(4, 0), textcoords="offset points", va="center", color=colour
        )
    ax.set_yticks(range(len(cases)), [label for label, _, _ in cases])
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.margins(x=0.2)
    ax.grid(False, axis="y")
