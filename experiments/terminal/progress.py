"""Progress of a run, shown while it goes on.

On a terminal: a line per finished cell, and below them the current cell with its step, loss and
seconds, the overall bar and the time left. In a log: the line per finished cell only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from experiments.matrix.reader import Matrix
from experiments.records.cell import Cell
from experiments.records.record import Record
from experiments.runner.directory import Step, last_step
from experiments.terminal.summary_table import STATE_STYLES, megabytes, varying_settings
from simulation.quantities import format_link

#: Redraws per second: enough to follow steps, and no load on cores that the ranks compute on.
_REDRAWS = 2
#: Titles of the settings that are most often axes; a line must fit on a hundred columns.
_SHORT = {"accumulation": "accum", "micro_batch": "batch", "sequence_length": "length"}
_FIGURES = "{:>9}{:>8}{:>8}"


class Progress:
    """Shows one run; a context manager around it, and the runner's observer."""

    def __init__(
        self,
        matrix: Matrix,
        cells: Sequence[Cell],
        finished: Sequence[Record],
        console: Console,
    ) -> None:
        self._matrix = matrix
        self._console = console
        ids = [cell.id for cell in cells]
        self._skipped = Counter(matrix.skipped[each] for each in ids if each in matrix.skipped)
        self._cells = [cell for cell in cells if cell.id not in matrix.skipped]
        self._finished = [record for record in finished if record.cell_id in ids]
        # Columns of finished cells' lines, as wide as these cells need.
        self._extra = varying_settings(self._cells)
        titles = ["strategy", "tuning", "model", "link"]
        titles += [_SHORT.get(of.name, of.setting.label.lower()) for of in self._extra]
        rows = [titles, *map(self._settings, self._cells)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        self._aligned = "  ".join(f"{{:{width}}}" for width in widths).format
        self._total = len(self._cells)
        self._numbers = max(len("cell"), len(f"{self._total}/{self._total}"))
        above = f"{'cell':>{self._numbers}} state   {self._aligned(*titles)}"
        figures = _FIGURES.format("tokens/s", "s/step", "MB/step")
        self._header = Text(f"{above}{figures}{'time':>6}", style="dim")
        #: The cell that runs, its directory, and when it has begun.
        self._current: tuple[Cell, Path, float] | None = None
        self._started = time.monotonic()
        self._begun = False
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        cluster = self._matrix.cluster
        kind = "simulated" if self._matrix.simulated else cluster.kind
        own_cores = kind == "emulated" and getattr(cluster, "cores", None) == "own"
        heading = Text.assemble(
            (self._matrix.name, "bold"),
            f" · {self._total} cells · {kind} cluster, {cluster.nodes} nodes × "
            f"{cluster.ranks_per_node} ranks{', cores of their own' * own_cores}",
        )
        self._console.print(heading)
        self._console.print(Text(self._matrix.description, style="dim"))
        for reason, count in self._skipped.items():
            cells = "cell" if count == 1 else "cells"
            self._console.print(Text(f"{count} {cells} skipped: {reason}", style="dim"))
        if self._finished:
            self._console.print(Text(f"{len(self._finished)} cells are finished already"))
        if len(self._finished) < self._total:
            doing = "simulating" if self._matrix.simulated else "starting the cluster"
            self._console.print(Text(f"{doing} …", style="dim"))
        return self

    def __exit__(self, *_: object) -> None:
        self._current = None
        if self._live is not None:
            self._live.stop()

    def cell_started(self, cell: Cell, directory: Path, started_at: str) -> None:
        if not self._begun:
            self._print(self._header)
            # Not earlier: the cluster is built by now, and its processes start without this thread.
            if self._console.is_interactive:
                self._live = Live(
                    console=self._console,
                    get_renderable=self.status,
                    refresh_per_second=_REDRAWS,
                    transient=True,
                )
                self._live.start()
        self._begun = True
        self._current = cell, directory, time.monotonic()

    def cell_finished(self, record: Record) -> None:
        """Add the cell's line; a skipped cell was announced at the start."""
        self._current = None
        if record.state != "skipped":
            self._finished.append(record)
            self._print(self._line(record))

    def status(self) -> RenderableType:
        """Lines about the current cell and the whole run, as of now."""
        rows, elapsed = list[Table](), 0.0
        step: Step | None = None
        if self._current is not None:
            cell, directory, started = self._current
            elapsed, step = time.monotonic() - started, last_step(directory)
            name = Text(cell.subject, style="bold")
            link = format_link(cell.inter_bandwidth_bits_per_s)
            name.append(f" · {cell.tuning} · {cell.model.name} · {link}", style="not bold")
            state = f"starting, {clock(elapsed)}"
            if step is not None:
                state = f"step {step.step} of {step.of}, loss {step.loss:.4f}, "
                state += f"{step.seconds:.2f} s/step"
            rows.append(_row(Text("now", style="dim"), name, Text(state, style="cyan")))
        done, ids = len(self._finished), {record.cell_id for record in self._finished}
        remaining = [cell for cell in self._cells if cell.id not in ids]
        left = seconds_left(remaining, self._finished, elapsed, step)
        times = f"{clock(time.monotonic() - self._started)} passed"
        if left is not None:
            times += f", about {clock(left)} left"
        bar = ProgressBar(total=self._total, completed=done, width=30)
        cells = f"{done} of {self._total} cells"
        rows.append(_row(Text("all", style="dim"), bar, cells, Text(times, style="dim")))
        return Group(Text(), *rows)

    def _print(self, line: Text) -> None:
        if self._console.is_interactive:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:  # a log has no width
            self._console.print(line, soft_wrap=True)

    def _line(self, record: Record) -> Text:
        measured, figures = record.measurement, ("–", "–", "–")
        if measured is not None:
            speed, seconds = f"{record.tokens_per_s:,.0f}", f"{record.step_seconds_median:.3f}"
            figures = speed, seconds, megabytes(measured.inter_node_bytes_per_step)
        return Text.assemble(
            (f"{len(self._finished)}/{self._total} ".rjust(self._numbers + 1), "dim"),
            (record.state.ljust(8), STATE_STYLES[record.state]),
            self._aligned(*self._settings(record.cell)),
            (_FIGURES.format(*figures), "dim" if measured is None else ""),
            (f"{record.seconds:>5.0f}s", "dim"),
        )

    def _settings(self, cell: Cell) -> list[str]:
        link = format_link(cell.inter_bandwidth_bits_per_s)
        extra = [item.written(item.of(cell)) for item in self._extra]
        return [cell.subject, cell.tuning, cell.model.name, link, *extra]


def seconds_left(
    remaining: Sequence[Cell], finished: Sequence[Record], elapsed: float, step: Step | None = None
) -> float | None:
    """Seconds that the remaining cells will take.

    The first of them is running: ``elapsed`` seconds are over, and each step to come is expected to
    take as long as ``step``, its last one. Other cells are expected to take as long as those with
    their bandwidth, on which a step's time depends most. ``None`` before anything is known.
    """
    if not remaining:
        return 0.0 if finished else None
    running, *others = remaining
    seconds = [(record.cell.inter_bandwidth_bits_per_s, record.seconds) for record in finished]
    left = None
    if step is not None:
        left = (step.of - step.step) * step.seconds
        seconds.append((running.inter_bandwidth_bits_per_s, elapsed + left))
    if not seconds:
        return None
    if left is None:
        left = max(0.0, _expected(running, seconds) - elapsed)
    return left + sum(_expected(cell, seconds) for cell in others)


def _expected(cell: Cell, seconds: Sequence[tuple[int | None, float]]) -> float:
    """The mean seconds of the cells with its bandwidth, or of all."""
    alike = [taken for link, taken in seconds if link == cell.inter_bandwidth_bits_per_s]
    known = alike or [taken for _, taken in seconds]
    return sum(known) / len(known)


def clock(seconds: float) -> str:
    """Seconds as ``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _row(*parts: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_row(*parts)
    return grid
