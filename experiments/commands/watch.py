"""``python -m experiments watch``: follow a run that goes on elsewhere."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Annotated

import typer

from experiments import terminal
from experiments.records.comparison import pooled
from experiments.records.record import Record, read
from experiments.records.select import FILE
from experiments.runner.directory import last_step
from experiments.terminal.summary_table import summary
from simulation.files import stored

#: Seconds between two looks.
_INTERVAL = 1.0


def watch(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="The run's directory.")],
) -> None:
    """Follow a run in another terminal: a line per finished cell, and the step that it is at.

    It ends when the run does, and then shows the table. Exit status: 0; 2 if there is no run.
    """
    console, file, seen = terminal.console(), run / FILE, 0
    if not (run / ".lock").is_file():
        terminal.stop(f"{run}: no run was started here; python -m experiments run writes to runs/")
    records: list[Record] = []
    with console.status("") as status:
        while True:
            ended = not _is_locked(run / ".lock")
            try:
                records = read(file) if stored(file).exists() else []
            except (ValueError, OSError) as error:
                terminal.stop(error)
            for record in records[seen:]:
                console.print(_line(record), highlight=False, soft_wrap=True)
            seen = len(records)
            if ended:
                break
            status.update(_now(run, {record.cell_id for record in records}))
            time.sleep(_INTERVAL)
    if records:
        console.print(summary(pooled(records)))


def _is_locked(file: Path) -> bool:
    """Whether a run holds its lock: another process's, so that asking for it takes nothing away."""
    with file.open("a+", encoding="utf-8") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _line(record: Record) -> str:
    seconds = record.step_seconds_median
    step = "" if seconds is None else f"  {seconds:.3f} s/step"
    return f"{record.state:<8}{record.cell_id}{step}"


def _now(run: Path, finished: set[str]) -> str:
    """The cell that runs and its last step."""
    started = [each for each in run.glob("cells/*") if each.name not in finished]
    if not started:
        return "no cell runs"
    newest = max(started, key=lambda each: each.stat().st_mtime)
    step = last_step(newest)
    at = "starting" if step is None else f"step {step.step} of {step.of}, {step.seconds:.2f} s/step"
    return f"{newest.name}: {at}"
