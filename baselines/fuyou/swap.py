"""Activations that leave the device from forward to backward: to host memory first, then to SSD."""

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from baselines.fuyou.memory import Dram
from baselines.fuyou.transfers import Copies, Disk
from fcdp.arena import aligned
from fcdp.direct_io import open_alone, reserve

ACTIVATIONS = "activations.bin"
#: Pieces of the largest size that host memory has room for while they pass to SSD and back.
_PASSING = 3


#: A block, and which of its activations.
Name = tuple[int, str, int]


@dataclass(eq=False)
class _Kept:
    """One activation: in host memory, where ``memory`` is, or on SSD."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    memory: torch.Tensor | None = None
    #: Its place on SSD; ``None``: it stays in host memory.
    place: int | None = None
    written: Future[int] | None = None
    read: Future[int] | None = None
    checksum: int = 0


class Swapper:
    """Keeps tensors under names until they are asked for, once."""

    def __init__(self, dram: Dram, disk: Disk, copies: Copies, folder: Path) -> None:
        self._dram = dram
        self._disk = disk
        self._copies = copies
        self._path = folder / ACTIVATIONS
        self._file = open_alone(self._path, "ssd")
        os.unlink(self._path)
        #: Where the next one's place on SSD is, and how far there is room.
        self._end = self._reserved = 0
        self._kept: dict[Name, _Kept] = {}
        self._writing: list[_Kept] = []
        self._largest = 0
        #: Bytes that host memory has for what stays there, beside what others pass through.
        self.limit: float = math.inf
        self._held = 0
        #: Bytes since the last ``take_counts``.
        self._counts = {"dram": 0, "ssd": 0}

    def spare(self, sizes: Iterable[float]) -> int:
        """Note that these sizes pass; return bytes of host memory that what goes to SSD needs."""
        self._largest = max([self._largest, *map(int, sizes)])
        return _PASSING * aligned(self._largest)

    def take_counts(self) -> dict[str, int]:
        """Bytes that were kept since the last call, by where."""
        counts, self._counts = self._counts, {"dram": 0, "ssd": 0}
        return counts

    def put(self, name: Name, tensor: torch.Tensor) -> None:
        assert name not in self._kept
        self._reap()
        tensor = tensor.detach()
        kept, size = _Kept(tensor.shape, tensor.dtype, tensor.nbytes), aligned(tensor.nbytes)
        spare = self.spare([kept.nbytes])
        if self._held + size <= self.limit:
            kept.memory = self._dram.try_take(kept.nbytes, spare)
        if kept.memory is None:
            kept.memory = self._room_to_pass(size)
            kept.place, self._end = self._end, self._end + size
            reserve(self._file, self._reserved, self._end, self._path, "ssd")
            self._reserved = max(self._reserved, self._end)
        landed = self._copies.out([self._view(kept)], [tensor])
        if kept.place is None:
            self._held += size
            for event in landed:  # the host waits for nothing: what reads it has the same stream
                event.wait()
        else:
            kept.written = self._disk.write(self._file, kept.place, kept.memory, landed)
            self._writing.append(kept)
        self._counts["dram" if kept.place is None else "ssd"] += kept.nbytes
        self._kept[name] = kept

    def expect_of(self, blocks: Sequence[int]) -> None:
        """Begin to read from SSD what these blocks keep, as far as there is room to pass through.

        The order is that of the blocks; half of the room is left for what is asked for first.
        """
        self._reap()
        for block in blocks:
            for name, kept in self._kept.items():
                if name[0] == block and kept.memory is None:
                    size = aligned(kept.nbytes)
                    memory = self._dram.try_take(size, spare=size)
                    if memory is None:
                        return
                    self._begin_to_read(kept, memory)

    def get(self, name: Name) -> torch.Tensor:
        """The tensor that was kept, on the device."""
        kept = self._kept.pop(name)
        if kept.memory is None:
            self._begin_to_read(kept, self._room_to_pass(aligned(kept.nbytes)))
        with self._copies.waiting():
            if kept.read is not None:
                kept.read.result()
            elif kept.written is not None and kept in self._writing:
                kept.written.result()
                self._writing.remove(kept)
        found = torch.empty(kept.shape, dtype=kept.dtype, device=self._copies.device)
        self._copies.into(found, self._view(kept))
        for event in self._copies.used():
            event.synchronize()
        self._give_back(kept)
        return found

    def clear(self) -> None:
        """Forget all that nobody asked for."""
        for kept in self._kept.values():
            for transfer in (kept.written, kept.read):
                if transfer is not None:
                    transfer.exception()
            if kept.memory is not None:
                self._give_back(kept)
        self._kept.clear()
        self._writing.clear()
        self._end = 0

    def _give_back(self, kept: _Kept) -> None:
        assert kept.memory is not None
        if kept.place is None:
            self._held -= aligned(kept.nbytes)
        self._dram.give_back(kept.memory)
        kept.memory = None

    def _begin_to_read(self, kept: _Kept, memory: torch.Tensor) -> None:
        assert kept.place is not None
        kept.memory = memory
        kept.read = self._disk.read(self._file, kept.place, memory, kept.checksum)

    def _view(self, kept: _Kept) -> torch.Tensor:
        assert kept.memory is not None
        return kept.memory[: kept.nbytes].view(kept.dtype).view(kept.shape)

    def _room_to_pass(self, nbytes: int) -> torch.Tensor:
        """Host memory for a while; waits for writes until there is some."""
        with self._copies.waiting():
            while (found := self._dram.try_take(nbytes)) is None and self._writing:
                self._landed(self._writing.pop(0))
        return self._dram.take(nbytes, "an activation") if found is None else found

    def _reap(self) -> None:
        done = [kept for kept in self._writing if kept.written and kept.written.done()]
        for kept in done:
            self._writing.remove(kept)
            self._landed(kept)

    def _landed(self, kept: _Kept) -> None:
        assert kept.written is not None
        kept.checksum = kept.written.result()
        self._give_back(kept)
