"""The study of memory at paper scale, as a run that claims are compared with and a page shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import axes, pages, strategies, text
from analysis.drawings import Drawing, style
from analysis.rows import Quantity, Row, settings_of
from experiments.records import Cell
from simulation.imitated.records import MemoryRecord, read
from simulation.transformer import Tuning

#: Width of a panel, and from one bar to the next, in inches.
WIDTH, PITCH = 1.9, 0.19


@dataclass(frozen=True)
class MemoryStudy:
    """Its records, one a case."""

    matrix: str
    #: Relative to the folder of results.
    file: str
    records: list[MemoryRecord]

    @property
    def rows(self) -> list[Row]:
        """What claims are compared with; what runs out of memory has a largest batch of none."""
        return [_row(record) for record in self.records]

    @property
    def resources(self) -> str:
        """What the study took: cases, time of all processes."""
        minutes = sum(record.seconds for record in self.records) / 60
        return f"{len(self.records)} cases, {text.number(minutes, 2)} min"

    @property
    def summary(self) -> str:
        """Where the records come from, in a sentence."""
        case, days = self.records[0].case, sorted(r.started_at[:10] for r in self.records)
        models = ", ".join(sorted({record.case.model.name for record in self.records}))
        how = ", ".join(sorted({f"{r.evidence} ({r.method})" for r in self.records}))
        return (
            f"One of {case.nodes} nodes × {case.ranks_per_node} ranks with "
            f"{case.device_bytes / 1e9:g} GB, {how} · {models} · {days[0]} to {days[-1]}."
        )

    @property
    def origin(self) -> list[tuple[str, str]]:
        """The same in full: what, and its value."""
        commits = sorted({record.commit or "unknown" for record in self.records})
        versions = {json.dumps(record.versions, sort_keys=True) for record in self.records}
        return [("Commit", ", ".join(commits))] + [
            ("Versions", ", ".join(f"{key} {value}" for key, value in json.loads(item).items()))
            for item in sorted(versions)
        ]

    def figures(self) -> list[dict[str, Any]]:
        """Its figure as a page takes it; none where nothing was found."""
        found = any(record.finding for record in self.records)
        return [pages.figure(draw(self))] if found else []


def load(file: Path) -> list[MemoryRecord]:
    """One record a case, the latest; raises ``ValueError`` for a malformed one."""
    latest = {r.case: r for r in sorted(read(file), key=lambda record: record.started_at)}
    return list(latest.values())


def _row(record: MemoryRecord) -> Row:
    case, finding = record.case, record.finding
    settings = settings_of(Cell.of_case(case)) | {"checkpointing": case.checkpointing}
    quantities: dict[Quantity, float] = {}
    if finding is not None:
        quantities["largest_micro_batch"] = finding.largest_micro_batch
        if finding.host_cache_bytes_per_node is not None:
            # In bfloat16, which is what is gathered.
            model = 2 * finding.parameters
            quantities["host_cache_share"] = finding.host_cache_bytes_per_node / model
    return Row(settings, record.state, record.evidence, quantities)


def draw(study: MemoryStudy) -> Drawing:
    """The largest micro-batch of each strategy: a row a model, a column a way of tuning."""
    models = sorted({record.case.model.name for record in study.records})
    kinds = list(product(get_args(Tuning), (False, True)))
    names = strategies.ordered(record.case.strategy for record in study.records)
    labels = sorted(
        {(names.index(r.case.strategy), r.case.label, r.case.strategy) for r in study.records}
    )
    height = len(models) * (PITCH * len(labels) + 0.7)
    with style():
        figure = Figure(figsize=(WIDTH * len(kinds) + 1.4, height), layout="constrained")
        grid = figure.subplots(len(models), len(kinds), sharey=True, sharex=True, squeeze=False)
        for (model, (tuning, again)), ax in zip(product(models, kinds), grid.flat, strict=True):
            found = {
                record.case.label: record
                for record in study.records
                if (record.case.model.name, record.case.tuning, record.case.checkpointing)
                == (model, tuning, again)
            }
            how = ", checkpointing" if again else ""
            ax.set_title(f"{model}\n{text.TUNINGS[tuning]}{how}")
            _draw_bars(ax, [(label, name, found.get(label)) for _, label, name in labels])
        for ax in grid[-1]:
            ax.set_xlabel("largest micro-batch")
    caption = (
        "Sequences a rank in the largest step that fits; 0: not one does. "
        f"{study.summary} Forward, backward and optimizer step are the real code, on tensors "
        "without contents."
    )
    return Drawing("memory-largest-micro-batch", "Largest micro-batch that fits", caption, figure)


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
