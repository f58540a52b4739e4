"""Tiers that entries lie in: memory of the accelerator, one arena on the host, a file on a disk."""

import errno
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fcdp.arena import POISON, Arena, aligned
from fcdp.cache import memory
from fcdp.direct_io import File, read, write
from fcdp.streams import Access, Slice, Streams, rows_as
from fcdp.unit import Unit, entry_size

logger = logging.getLogger("fcdp")


class TierUnavailable(Exception):
    """The tier cannot take this entry now; its message says why."""


class Tier(ABC):
    """Holds, for some units, the rows of slices that this rank received from the other nodes.

    This rank's own row is left out, since it is at hand anyway. Copies out of slices run on one
    stream, copies into them on another.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    @abstractmethod
    def store(self, unit: Unit, source: Slice) -> None:
        """Take a copy of the other nodes' rows, once they have been written.

        Raises :class:`TierUnavailable` before anything was copied.
        """

    @abstractmethod
    def load(self, unit: Unit, target: Slice) -> None:
        """Fill the other nodes' rows, on the stream that is the slice's home."""

    def intact(self, unit: Unit) -> bool:
        """Whether the entry can be loaded; may wait for it. Always true of memory."""
        return True

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Discard the unit's entry and free its memory; without an entry nothing happens."""

    def _rows(self, memory: torch.Tensor, unit: Unit) -> torch.Tensor:
        """An entry's bytes as uint8 (nodes − 1, shard bytes): the other nodes' in node order."""
        return memory[: entry_size(unit)].view(unit.topology.nodes - 1, unit.shard_bytes)

    def _copy_in(self, source: Slice, rows: torch.Tensor, access: Access) -> None:
        """Queue a copy of a slice to ``rows``, whose accesses ``access`` orders."""
        stored, parts = self._runs(rows, source)
        stream = self._streams.copies_out
        self._streams.copy(stored, parts, stream, reads=source.access, writes=access)

    def _copy_out(self, rows: torch.Tensor, access: Access, target: Slice) -> None:
        """Queue a copy of ``rows`` to a slice."""
        stored, parts = self._runs(rows, target)
        self._streams.copy(parts, stored, target.home, reads=access, writes=target.access)

    def _runs(
        self, rows: torch.Tensor, of: Slice
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Split stored rows as those of a slice, in at most two runs and in the slice's dtype."""
        rows = rows_as(of.memory.dtype, rows)
        parts = of.others()
        if len(parts) == 1:
            return [rows], parts
        below = len(parts[0])  # nodes before this one
        return [rows[:below], rows[below:]], parts


@dataclass(eq=False)
class _Area:
    """Memory of one entry, overwritten in place."""

    rows: torch.Tensor
    #: Keeps memory that was taken outside of the plan.
    arena: Arena | None = None
    access: Access = field(default_factory=Access)


class _MemoryTier(Tier):
    """Entries each in an area of its own."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._areas: dict[Unit, _Area] = {}

    @abstractmethod
    def _take(self, unit: Unit) -> _Area:
        """Take memory for a unit that has none. Raises :class:`TierUnavailable`."""

    def store(self, unit: Unit, source: Slice) -> None:
        if unit not in self._areas:
            self._areas[unit] = self._take(unit)
        area = self._areas[unit]
        self._copy_in(source, area.rows, area.access)

    def load(self, unit: Unit, target: Slice) -> None:
        area = self._areas[unit]
        self._copy_out(area.rows, area.access, target)


class DeviceTier(_MemoryTier):
    """Entries stay on the accelerator (ZeRO++'s hpZ; MiCS keeps as much).

    One tensor per unit, allocated on the stream of copies out of slices when it is first stored: it
    is always written there.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        #: Units that the device had no memory for: asking a full device again at each store would
        #: have the allocator give its reserve back and wait for the device each time.
        self._refused: set[Unit] = set()

    @property
    def nbytes(self) -> int:
        """Device memory that entries take."""
        return sum(area.rows.numel() for area in self._areas.values())

    def drop(self, unit: Unit) -> None:
        if unit in self._areas:
            # Its memory goes back to the stream it came from: not before others have read it.
            self._areas[unit].access.freed_for(self._streams.copies_out)
            del self._areas[unit]

    def _take(self, unit: Unit) -> _Area:
        size = entry_size(unit)
        if unit in self._refused:
            raise TierUnavailable("the device had no memory")
        try:
            with self._streams.on(self._streams.copies_out):
                taken = torch.empty(size, dtype=torch.uint8, device=self._streams.device)
        except torch.OutOfMemoryError as error:
            self._refused.add(unit)
            raise TierUnavailable(f"the device has no {size / 2**20:.1f} MiB free") from error
        return _Area(self._rows(taken, unit))


class HostTier(_MemoryTier):
    """One arena for the planned units, page-locked on CUDA; memory for others as they come."""

    def __init__(self, planned: Sequence[Unit], streams: Streams, *, poison: bool) -> None:
        super().__init__(streams)
        self._poison = poison
        self.nbytes = arena_bytes(planned)
        # Referenced, as memory stays page-locked for as long as its arena lives.
        self._arena = Arena(self.nbytes, streams.device, poison=poison)
        for unit in planned:
            self._areas[unit] = _Area(self._rows(self._arena.take(entry_size(unit)), unit))

    def drop(self, unit: Unit) -> None:
        """Memory of the arena stays for the unit."""
        if self._poison and unit in self._areas:
            for event in self._areas[unit].access.events():
                event.synchronize()
            self._areas[unit].rows.fill_(POISON)

    def _take(self, unit: Unit) -> _Area:
        size = entry_size(unit)
        free = memory.available_host_memory()
        if free is not None and size > free:
            raise TierUnavailable(f"the host has no {size / 2**20:.1f} MiB free")
        try:
            arena = Arena(size, self._streams.device, poison=self._poison)
        except (RuntimeError, OSError) as error:
            raise TierUnavailable(str(error)) from error
        self.nbytes += size
        return _Area(self._rows(arena.take(size), unit), arena)


def arena_bytes(planned: Sequence[Unit]) -> int:
    """Host memory that the arena of one rank takes."""
    return sum(aligned(entry_size(unit)) for unit in planned)


@dataclass(eq=False)
class _Buffer:
    """Host memory that one entry passes through, aligned for direct I/O."""

    memory: torch.Tensor
    unit: Unit | None = None
    #: The transfer under way; its result is the checksum of what was moved.
    transfer: Future[int] | None = None
    writing: bool = False
    #: The device's copies into and out of the memory.
    access: Access = field(default_factory=Access)


#: Rank of :func:`_cost_of_taking` up to which no entry is lost and nothing is waited for.
_FREE = 1


def _cost_of_taking(buffer: _Buffer) -> int:
    """Rank what taking a buffer costs: empty, written, being written, expected by a load."""
    if buffer.unit is None:
        return 0
    if not buffer.writing:
        return 3
    return 1 if buffer.transfer is None or buffer.transfer.done() else 2


class DiskTier(Tier):
    """Entries in one file a rank, read and written past the page cache.

    A few buffers bound what is in flight: a store waits for one when all are being written.

    The file has no name once it is open, so that nothing is left whatever ends the process. A
    failed write or read loses the entry, never the parameters: :meth:`intact` says so before the
    gather, which then crosses nodes. What is read is compared with the checksum of what was
    written, so that a file that somebody cut or overwrote is a failed read too.
    """

    def __init__(
        self,
        planned: Sequence[Unit],
        streams: Streams,
        *,
        directory: Path,
        buffers: int,
    ) -> None:
        """Open the file. Raises ``ValueError`` if ``directory`` cannot be written."""
        super().__init__(streams)
        self._file = _open(directory)
        self._offsets: dict[Unit, int] = {}
        offset = 0
        for unit in planned:
            self._offsets[unit] = offset
            offset += aligned(entry_size(unit))
        #: Checksum of each entry in the file.
        self._sums: dict[Unit, int] = {}
        self._failed: set[Unit] = set()
        self._warned = False
        self.nbytes = buffer_bytes(planned, buffers)
        self._arena = Arena(self.nbytes, streams.device)
        size = self.nbytes // buffers
        self._buffers = [_Buffer(self._arena.take(size)) for _ in range(buffers)]
        # Each thread has one transfer in hand; a disk is busy with a few. Threads end by themselves
        # once the tier is gone. Nothing waits for them: the garbage collector may run while a
        # thread holds the very locks that joining another takes.
        self._threads = ThreadPoolExecutor(buffers, "fcdp-disk")

    def store(self, unit: Unit, source: Slice) -> None:
        if unit not in self._offsets:
            raise TierUnavailable("was not planned for it")
        self.drop(unit)
        buffer = self._take_buffer()
        self._copy_in(source, self._rows(buffer.memory, unit), buffer.access)
        self._begin(buffer, unit)

    def load(self, unit: Unit, target: Slice) -> None:
        buffer = self._holding(unit)
        assert buffer is not None, f"{unit.name}: loaded without intact()"
        self._copy_out(self._rows(buffer.memory, unit), buffer.access, target)
        if not buffer.writing:
            buffer.unit = None

    def expect(self, unit: Unit) -> None:
        """A load of this unit is near: begin to read it, if a buffer is free."""
        if unit in self._failed or unit not in self._offsets or self._holding(unit) is not None:
            return
        buffer = min(self._buffers, key=_cost_of_taking)
        if _cost_of_taking(buffer) <= _FREE:
            self._begin(self._take_buffer(), unit, expected=self._sums[unit])

    def intact(self, unit: Unit) -> bool:
        """Read the entry into a buffer, if it is in none; return ``False`` if the disk failed."""
        if unit in self._failed:
            return False
        buffer = self._holding(unit)
        if buffer is None:
            buffer = self._take_buffer()
            if unit in self._failed:  # its write was what the buffer waited for
                return False
            self._begin(buffer, unit, expected=self._sums[unit])
        if buffer.writing:
            return True  # what is being written can be loaded from where it is written from
        self._finish(buffer)
        return unit not in self._failed

    def drop(self, unit: Unit) -> None:
        buffer = self._holding(unit)
        if buffer is not None:
            self._finish(buffer)
            buffer.unit = buffer.transfer = None
        self._failed.discard(unit)

    def _begin(self, buffer: _Buffer, unit: Unit, *, expected: int | None = None) -> None:
        """Begin to write the buffer, or to read into it what has the checksum ``expected``."""
        buffer.unit, buffer.writing = unit, expected is None
        move = write if expected is None else partial(read, expected=expected)
        memory, landed = buffer.memory[: aligned(entry_size(unit))], buffer.access.events()
        buffer.transfer = self._threads.submit(
            partial(move, self._file, self._offsets[unit], memory, landed=landed)
        )

    def _holding(self, unit: Unit) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.unit is unit), None)

    def _take_buffer(self) -> _Buffer:
        """The buffer that is soonest free, emptied."""
        buffer = min(self._buffers, key=_cost_of_taking)
        self._finish(buffer)
        buffer.unit = None
        return buffer

    def _finish(self, buffer: _Buffer) -> None:
        """Wait for the buffer's transfer; note what it lost."""
        if buffer.transfer is None:
            return
        unit = buffer.unit
        assert unit is not None
        try:
            self._sums[unit] = buffer.transfer.result()
        except OSError as error:
            self._failed.add(unit)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "disk cache: %s (%s); what it cannot hold is gathered across nodes again",
                    error.strerror or os.strerror(error.errno or errno.EIO),
                    unit.name,
                )
        buffer.transfer = None  # not before it has ended: somebody may interrupt the wait
        if buffer.writing or unit in self._failed:
            buffer.unit, buffer.writing = None, False


def buffer_bytes(planned: Sequence[Unit], buffers: int) -> int:
    """Host memory that the entries of one rank pass through."""
    sizes = (aligned(entry_size(unit)) for unit in planned)
    return buffers * max(sizes, default=0)


def check_directory(directory: Path | None) -> None:
    """Raise ``ValueError`` if entries go to the disk and ``directory`` takes no file."""
    if directory is not None:
        file, name = _make_file(directory)
        os.close(file)
        os.unlink(name)


def _make_file(directory: Path) -> tuple[int, str]:
    try:
        return tempfile.mkstemp(prefix="fcdp-cache-", dir=directory)
    except OSError as error:
        raise ValueError(
            f"directory = {str(directory)!r}: must exist and be writable ({error.strerror})"
        ) from error


def _open(directory: Path) -> File:
    """A new file without a name; direct I/O where the file system has it (tmpfs has not)."""
    descriptor, name = _make_file(directory)
    file = File(descriptor)
    try:
        return File(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        logger.warning("disk cache: %s has no direct I/O; the page cache is used too", directory)
        return file
    finally:
        os.unlink(name)
