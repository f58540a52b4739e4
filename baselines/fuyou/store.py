"""The state on SSD: two generations of every group, and a record that says which one counts.

A step reads the generation of the step before and writes the other. When all of it is on disk, a
record of a few bytes takes the place of the last one by renaming. Whenever the process ends, the
record names a step all of whose bytes are there; what is read is compared with the checksums that
it has.

A step may end before it is written (``end``). Then reads are of what it writes, each group's once
that is there; what its record will replace stays until then.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baselines.fuyou.disk import Disk, opened, reserve
from baselines.fuyou.layout import Group, Layout, Segment
from fcdp import durable

_FORMAT = 1
RECORD, STATE = "step.json", "state.bin"


class Store:
    """The files of one model in training."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        """Raises ``ValueError`` for a folder without room, of another model, or in use."""
        self._folder = folder
        self._layout = layout
        self._disk = disk
        self._file = opened(folder / STATE)
        #: Steps whose state is complete, and the generation that it is in.
        self.step = 0
        self._generation = 0
        #: Checksums by segment, of the complete step and of the one that is being written.
        self._sums: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._aside: dict[int, int] = {}
        #: Whether the step that is being written has ended, so that reads are of it; and what went
        #: wrong in a write, or in a record.
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        #: Whether the folder has a complete step, which is gone on from.
        self.resumes = (folder / RECORD).exists()
        if self.resumes:
            self._resume()  # before the file grows: it may be another model's
        reserve(self._file, 0, layout.total, folder)

    @property
    def steps_ended(self) -> int:
        """Steps that have ended, of which the last one may not be complete on SSD."""
        with self._changed:
            return self.step + self._ended

    def end(self) -> None:
        """Have reads be of the step that is being written."""
        with self._changed:
            assert not self._ended, "the step before counts"
            self._ended = True

    def read(self, group: Group, names: Sequence[str], buffer: torch.Tensor) -> list[Future[int]]:
        """Begin to read segments of the last step into a buffer of the whole group.

        Waits until they are written. Raises what went wrong in a write.
        """
        return [
            self.read_segment(group, segment, group.part(buffer, segment.name))
            for segment in group.segments
            if segment.name in names
        ]

    def read_segment(self, group: Group, segment: Segment, memory: torch.Tensor) -> Future[int]:
        key = _key(group, segment)
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not (self._ended and group.trained) or key in self._next
            )
            if self._error is not None:
                raise self._error
            newest = self._ended and group.trained
            generation = 1 - self._generation if newest else self._generation
            expected = (self._next if newest else self._sums)[key]
        return self._disk.read(
            self._file, self._place(group, segment, generation), memory, expected
        )

    def write(self, group: Group, buffer: torch.Tensor, *, first: bool = False) -> None:
        """Write a group to the generation that does not count yet.

        ``first``: to the one that the first record will name. Raises what went wrong before:
        nothing is written after that.
        """
        if self._error is not None:
            raise self._error  # of a record perhaps, which may name what would be overwritten
        generation = self._generation if first else 1 - self._generation
        with self._failing():
            under_way = [
                self._disk.write(
                    self._file,
                    self._place(group, segment, generation),
                    group.part(buffer, segment.name),
                )
                for segment in group.segments
            ]
            wait(under_way)  # all of them, that the buffer is free even if one fails
            sums = [written.result() for written in under_way]
        with self._changed:
            for segment, found in zip(group.segments, sums, strict=True):
                self._next[_key(group, segment)] = found
            self._changed.notify_all()

    def put_aside(self, group: Group, gradient: torch.Tensor) -> None:
        """Keep a gradient for later in the same step."""
        place = self._layout.gradients[group.index]
        self._aside[group.index] = self._disk.write(self._file, place, gradient).result()

    def take_aside(self, group: Group, memory: torch.Tensor) -> Future[int] | None:
        """Begin to read what was put aside, once; ``None`` if nothing was."""
        if group.index not in self._aside:
            return None
        expected = self._aside.pop(group.index)
        return self._disk.read(self._file, self._layout.gradients[group.index], memory, expected)

    def commit(self, step: int) -> None:
        """Have what was written since the last record count: all of it, or nothing."""
        with self._failing():
            generation = 1 - self._generation if step else 0
            sums = self._sums | self._next
            self._replace_record(step, generation, sums)
        with self._changed:
            self.step, self._generation, self._sums, self._next = step, generation, sums, {}
            self._ended = False
            self._changed.notify_all()

    def _replace_record(self, step: int, generation: int, sums: dict[str, int]) -> None:
        every = {
            _key(group, segment): group.trained
            for group in self._layout.groups()
            for segment in group.segments
        }
        lacking = [key for key, trained in every.items() if trained and key not in self._next]
        assert not lacking, f"not written: {lacking}"
        assert sums.keys() == every.keys()
        said = {
            "format": _FORMAT,
            "step": step,
            "generation": generation,
            "layout": self._layout.fingerprint,
            "sums": sums,
        }
        os.fsync(self._file.descriptor)
        durable.replace(self._folder / RECORD, _sealed(json.dumps(said)))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Tell who waits for a write when it fails, and have none come after it."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise

    def _resume(self) -> None:
        """Go on from the last complete step. Raises ``ValueError`` for one of another model."""
        path = self._folder / RECORD
        said = _unsealed(path.read_text(encoding="ascii"), path)
        for name, expected in (("format", _FORMAT), ("layout", self._layout.fingerprint)):
            if said[name] != expected:
                raise ValueError(
                    f"{path}: {name} = {said[name]!r}: must be {expected!r}, that of this model"
                )
        self.step, self._generation = said["step"], said["generation"]
        self._sums, self._next = said["sums"], {}

    def close(self) -> None:
        """Leave the folder to others, even if an error that somebody holds still has the file."""
        fcntl.flock(self._file.descriptor, fcntl.LOCK_UN)

    def _place(self, group: Group, segment: Segment, generation: int) -> int:
        return segment.offset + (generation if group.trained else 0) * self._layout.generation


def _key(group: Group, segment: Segment) -> str:
    return f"{group.index} {segment.name}"


def _sealed(text: str) -> str:
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n"


def _unsealed(sealed: str, path: Path) -> dict[str, Any]:
    text, _, total = sealed.rstrip("\n").rpartition("\n")
    if f"{zlib.crc32(text.encode()):08x}" != total:
        raise ValueError(f"{path}: damaged: its checksum is not that of what it says")
    said: dict[str, Any] = json.loads(text)
    return said
