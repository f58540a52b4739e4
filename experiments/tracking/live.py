"""Weights & Biases while a cell runs: its steps, as they end.

Rank 0 appends each step to ``progress.jsonl``; a thread of the runner reads on there and logs what
is new, with the time that rank 0 gives, so that W&B's clock is the training's. Whatever goes wrong
is left to ``sink.export``, which writes what is not whole once all cells are finished.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.records.cell import Cell
from experiments.records.record import Record
from experiments.runner.directory import Step
from experiments.tracking import sink
from experiments.worker import PROGRESS

#: Seconds between two looks at the steps: rare enough to be no load on cores that train.
_INTERVAL_S = 0.5
#: A run that ends with its cell is worth a look while it lasts: the machine's load is sampled, and
#: W&B's file is as new as what was logged.
_SETTINGS = {"x_disable_stats": False, "x_transaction_log_flush_interval": _INTERVAL_S}


class Live:
    """Follows the cells of one run; a context manager around it, and an observer of the runner.

    ``link`` is called with the address of each W&B run that is online.
    """

    def __init__(
        self, directory: Path, link: Callable[[str], None], sweep_run: str | None = None
    ) -> None:
        self._directory = directory
        self._link = link
        self._sweep_run = sweep_run
        self._mode, _ = sink.asked_mode()
        self._follower: _Follower | None = None

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(None)
        sink.settle()

    def cell_started(self, cell: Cell, directory: Path, started_at: str) -> None:
        """Begin the cell's W&B run, and follow its steps from now on."""
        if self._mode == "disabled":
            return
        wandb_run = sink.cell_run(cell, started_at, self._sweep_run)
        self._follower = _Follower(self, wandb_run, directory / PROGRESS)
        self._follower.start()

    def cell_finished(self, record: Record) -> None:
        """End the cell's W&B run, which takes the rest of the record."""
        self._end(record)

    def _end(self, record: Record | None) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.end(record)

    def begin(self, wandb_run: sink.WandbRun) -> Any:
        """Begin a W&B run, and all after it offline if W&B is not reached."""
        run, self._mode = sink.begin(wandb_run, self._directory, self._mode, [], **_SETTINGS)
        if self._mode == "online":
            self._link(run.url)
        return run

    def mark_whole(self, wandb_run: sink.WandbRun) -> None:
        """Leave nothing of the run to ``sink.export``."""
        sink.mark_whole(wandb_run, self._directory)


class _Follower(threading.Thread):
    """Logs one cell's steps until it has ended.

    The runner's thread sets ``_record`` before ``_ended``; all else is this thread's own.
    """

    def __init__(self, live: Live, wandb_run: sink.WandbRun, progress: Path) -> None:
        super().__init__(name="wandb", daemon=True)
        self._live = live
        self._wandb_run = wandb_run
        self._progress = progress
        self._record: Record | None = None
        self._ended = threading.Event()

    def end(self, record: Record | None) -> None:
        """Have it log what is left, and end the W&B run: as failed, if there is no record."""
        self._record = record
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Log the steps, then what the record says."""
        try:
            run = self._live.begin(self._wandb_run)
            for step in self._steps():
                point = {"loss": step.loss, "step_seconds": step.seconds, "_timestamp": step.at}
                run.log(point, step=step.step, commit=True)
            if self._record is not None:
                sink.end(run, self._record)
            run.finish(exit_code=sink.exit_code(self._record))
        except Exception:
            # It is no reason to end a measurement; ``export`` tries again and says what is wrong.
            return
        if self._record is not None:
            self._live.mark_whole(self._wandb_run)

    def _steps(self) -> Iterator[Step]:
        """The steps as their lines are there, until the cell has ended."""
        offset, ended = 0, False
        while not ended:
            ended = self._ended.wait(_INTERVAL_S)
            if not self._progress.exists():
                continue
            with self._progress.open("rb") as file:
                file.seek(offset)
                *lines, rest = file.read().split(b"\n")
                offset = file.tell() - len(rest)
            yield from (Step(**json.loads(line)) for line in lines)
