"""State that survives a kill: regions of one file, each in two generations, of which one counts.

A step reads the generation of the step before and writes the other. When all of it is on the disk,
a small record takes the place of the last one. Whenever the process ends, the record names a step
all of whose bytes are there, and that nothing has written to since.

A step may be read before its record is there, each region once that is written; nothing of the
step after it is written before.
"""

import fcntl
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines import ssd
from fcdp import durable

RECORD, STATE = "step.json", "state.bin"
_FORMAT = 3


@dataclass(frozen=True)
class Region:
    """A part of the state, whose bytes are whole pages."""

    nbytes: int
    #: Whether steps change it; what they do not is written once, and has one place.
    changes: bool = True


class Generations:
    """The state in one folder, opened by one process at a time."""

    def __init__(
        self,
        folder: Path,
        field: str,
        regions: Mapping[str, Region],
        *,
        about: str,
        more: int = 0,
        direct: bool = True,
    ) -> None:
        """Open the file, or make it with all the room that it will need.

        ``field`` names the option that chose the folder; ``about`` identifies what the state is of;
        ``more`` are bytes behind it (``end``) that need not survive; with ``direct`` the file
        system must have direct I/O.

        Raises ``ValueError`` for a folder without room or in use, and for state that is damaged or
        of something else.
        """
        self._regions = regions
        self._about = about
        self._record = folder / RECORD
        self._places: dict[str, int] = {}
        ends = {True: 0, False: 0}
        for key, region in regions.items():
            self._places[key] = ends[region.changes]
            ends[region.changes] += region.nbytes
        self._generation = ends[True]
        self.end = 2 * ends[True] + ends[False]
        #: The last complete step; -1: there is none.
        self._step = -1
        #: Checksums of that step's regions, and of those of the one that is being written.
        self._sums: dict[str, int | None] = {}
        self._next: dict[str, int | None] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        path = folder / STATE
        size = path.stat().st_size if path.exists() else None
        self.file = ssd.open_alone(path, field, direct=direct)
        try:
            self._resume(path, size)
            ssd.reserve(self.file, 0, self.end + more, path=path, field=field)
        except BaseException:
            if size is None:
                path.unlink(missing_ok=True)
            else:
                os.ftruncate(self.file.descriptor, size)
            self.close()
            raise
        self._left = self._lacking()

    @property
    def step(self) -> int | None:
        """The last complete step; ``None``: there is none."""
        with self._changed:
            return None if self._step < 0 else self._step

    def find(self, key: str, step: int) -> tuple[int, int | None]:
        """Return the place of a region as of ``step``, and its checksum if it was noted with one.

        Waits until it is written. Raises what went wrong in a write.
        """
        changes = self._regions[key].changes

        def known() -> dict[str, int | None] | None:
            if not changes or self._step >= step:
                return self._sums
            return self._next if self._step == step - 1 and key in self._next else None

        with self._changed:
            self._changed.wait_for(lambda: self._error or known() is not None)
            if self._error is not None:
                raise self._error
            sums = known()
            assert sums is not None
            return self._place(key, step), sums[key]

    def room(self, key: str, step: int) -> int:
        """Return the place to write a region as of ``step``, once the step before is complete.

        Raises what went wrong before: nothing is written after that.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._step >= step - 1)
            if self._error is not None:
                # The error may be a record's, which may name what would be overwritten.
                raise self._error
            return self._place(key, step)

    def note(self, key: str, checksum: int | None = None) -> bool:
        """Say that a region is written. Returns whether all of the step are, for ``commit``."""
        with self._changed:
            self._left -= key not in self._next
            self._next[key] = checksum
            self._changed.notify_all()
            return not self._left

    def commit(self, step: int) -> None:
        """Commit what was written since the last record: all of it, or nothing."""
        with self.failing():
            assert not self._left, f"not written: {self._left} regions"
            assert step == self._step + 1
            sums = self._sums | self._next
            record = {"format": _FORMAT, "step": step, "about": self._about, "sums": sums}
            os.fsync(self.file.descriptor)
            durable.replace(self._record, durable.sealed(f"{json.dumps(record)}\n".encode()))
        with self._changed:
            self._step, self._sums, self._next = step, sums, {}
            self._left = self._lacking()
            self._changed.notify_all()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise the block's error in all that wait, and write nothing after it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Make every caller that waits now, or comes later, raise ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the folder to others, even if an error that somebody holds still has the file."""
        fcntl.flock(self.file.descriptor, fcntl.LOCK_UN)

    def _place(self, key: str, step: int) -> int:
        if self._regions[key].changes:
            return self._places[key] + step % 2 * self._generation
        return 2 * self._generation + self._places[key]

    def _lacking(self) -> int:
        """How many regions the next step has to write."""
        return sum(region.changes or self._step < 0 for region in self._regions.values())

    def _resume(self, path: Path, size: int | None) -> None:
        if not self._record.exists():
            return
        record: dict[str, Any] = json.loads(
            durable.unsealed(self._record.read_bytes(), self._record)
        )
        for name, expected in (("format", _FORMAT), ("about", self._about)):
            if record[name] != expected:
                raise ValueError(
                    f"{self._record}: {name} = {record[name]!r}: must be {expected!r}, that of "
                    "this model and its settings; or an empty folder"
                )
        if size is None or size < self.end:
            raise ValueError(
                f"{path}: {'is missing' if size is None else f'has {size} bytes'}, where a "
                f"complete step is; must have {self.end}"
            )
        self._step, self._sums = record["step"], record["sums"]
