"""The directory of one matrix's run, and what is kept of the runs before it.

::

    records.jsonl     one line per finished cell; the truth that everything else is drawn from
    cells/<cell id>/  cell.json, measurement.json, progress*.jsonl, logs/, checkpoint/ until it ends
    wandb/            the same figures as W&B runs
    report/           tables, figures, report
    earlier/<time>/   what stood here when the matrix was started afresh
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from experiments.matrix.reader import Matrix
from experiments.records.record import Record
from experiments.records.record import read as read_records
from experiments.records.select import FILE
from experiments.worker import CHECKPOINT, PROGRESS, progress
from simulation import files

#: States whose cells run again on request; an OOM and a skip would only repeat themselves.
RETRIED = ("failed", "timeout")


@dataclass(frozen=True)
class Step:
    """One step of a cell that is running: rank 0's, or what a record has of all ranks."""

    step: int
    of: int
    loss: float
    seconds: float
    #: Time of its end, in seconds since 1970.
    at: float


def steps(directory: Path, start: int, ranks: int) -> list[Step]:
    """Return the steps, from index ``start`` on, that every rank of the running cell has ended.

    Losses are means over ranks, seconds the slowest rank's. An incomplete line is left out.
    """
    by_rank: list[list[Step]] = []
    for rank in range(ranks):
        try:
            lines = files.lines(directory / progress(rank))[start:]
        except OSError:  # The worker has not come to its first step yet.
            return []
        by_rank.append([Step(**json.loads(line)) for line in lines])
    return [
        replace(of[0], loss=sum(s.loss for s in of) / ranks, seconds=max(s.seconds for s in of))
        for of in zip(*by_rank, strict=False)
    ]


def last_step(directory: Path) -> Step | None:
    """The newest step of rank 0; ``None`` before the first."""
    return next(iter(steps(directory, -1, 1)), None)


class RunDirectory:
    """Records and cells of one run of a matrix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records = path / FILE
        self.cells = path / "cells"
        self.wandb = path / "wandb"
        self.report = path / "report"
        self._earlier = path / "earlier"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out. Raises ``ValueError`` if one is in already.

        The kernel frees this lock when its process ends, however it ends, so that a killed run
        leaves no stale lock; and unlike ``flock`` it does not pass to the ranks that we start.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ValueError(
                    f"{self.path}: another run (process {holder}) uses this directory; "
                    "wait for it, or give another one with --output"
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def start_afresh(self) -> Path | None:
        """Move what an earlier run left to ``earlier/<time>``; return that folder, if any."""
        # The records last: if this is cut short, they still say what was finished.
        records = files.stored(self.records)
        left = [p for p in (self.report, self.wandb, self.cells, records) if p.exists()]
        if not left:
            return None
        archive = self._new_archive()
        for path in left:
            path.rename(archive / path.name)
        return archive

    def resume(self, matrix: Matrix, retry_failed: bool) -> list[Record]:
        """Records of finished cells; of cells to run again, lines and logs move to ``earlier``.

        Raises what ``kept`` raises.
        """
        finished = self.kept(matrix, retry_failed)
        dropped = [record for record in self._all() if record not in finished]
        if dropped:
            archive = self._new_archive()
            records = files.stored(self.records)
            shutil.copy2(records, archive / records.name)
            for path in (self.cells / record.cell_id for record in dropped):
                if path.exists():
                    (archive / "cells").mkdir(exist_ok=True)
                    path.rename(archive / "cells" / path.name)
            files.write(finished, self.records)
        return finished

    def kept(self, matrix: Matrix, retry_failed: bool) -> list[Record]:
        """Records that ``resume`` keeps: not those of cells that failed before their first step.

        Nor those of cells that were skipped and are no longer; with ``retry_failed`` of no failure.
        Raises ``ValueError`` for records of another matrix or another kind of cluster: a simulated
        cell has the same id as the cell that really runs.
        """
        finished = self._all()
        to_run = {cell.id for cell in matrix.running}
        for record in finished:
            for what, recorded, expected in (
                ("of matrix", record.cell.matrix, matrix.name),
                ("that are", record.evidence, matrix.evidence),
            ):
                if recorded != expected:
                    raise ValueError(
                        f"{self.records}: holds records {what} {recorded!r}, "
                        f"not {expected!r}; give another directory with --output"
                    )

        def runs_again(record: Record) -> bool:
            folder = self.cells / record.cell_id
            never_began = folder.is_dir() and not (folder / PROGRESS).exists()
            if record.state in RETRIED:
                return retry_failed or never_began
            return record.state == "skipped" and record.cell_id in to_run

        return [record for record in finished if not runs_again(record)]

    def _all(self) -> list[Record]:
        return read_records(self.records) if files.stored(self.records).exists() else []

    def new_cell(self, cell_id: str) -> Path:
        """Make a cell's directory; of one that was cut short, checkpoint and steps stay there."""
        path = self.cells / cell_id
        path.mkdir(parents=True, exist_ok=True)
        goes_on = (path / CHECKPOINT).is_dir()
        for left in path.iterdir():
            if left.is_dir() and left.name != CHECKPOINT:
                shutil.rmtree(left)
            elif goes_on and left.match("progress*.jsonl"):
                whole, _, _ = left.read_bytes().rpartition(b"\n")
                left.write_bytes(whole + b"\n" if whole else b"")  # a kill may cut the last line
            elif not left.is_dir():
                left.unlink()
        return path

    def _new_archive(self) -> Path:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
        path = self._earlier / now
        path.mkdir(parents=True)
        return path
