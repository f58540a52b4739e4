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
from baselines.ssd import open_alone, reserve
from fcdp.arena import aligned

ACTIVATIONS = "activations.bin"
#: Pieces of the largest size that host memory has room for while they pass to SSD and back.
_PASSING = 3


#: A block, and which of its activations.
Name = tuple[int, str, int]


@dataclass(eq=False)
class _Activation:
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
        #: Ends of the activations on SSD, and of the room that is reserved for them.
        self._end = self._reserved = 0
        self._activations: dict[Name, _Activation] = {}
        self._writing: list[_Activation] = []
        self._largest = 0
        #: Bytes of host memory for activations that stay there, beside the room to pass through.
        self.limit: float = math.inf
        self._held = 0
        #: Bytes since the last ``take_counts``.
        self._counts = {"dram": 0, "ssd": 0}

    def spare(self, sizes: Iterable[float]) -> int:
        """Note that activations of these sizes pass; return the host memory to pass through."""
        self._largest = max([self._largest, *map(int, sizes)])
        return _PASSING * aligned(self._largest)

    def take_counts(self) -> dict[str, int]:
        """Bytes that were swapped out since the last call, by place."""
        counts, self._counts = self._counts, {"dram": 0, "ssd": 0}
        return counts

    def put(self, name: Name, tensor: torch.Tensor) -> None:
        assert name not in self._activations
        self._reap()
        activation = _Activation(tensor.shape, tensor.dtype, tensor.nbytes)
        spare, size = self.spare([tensor.nbytes]), aligned(tensor.nbytes)
        if self._held + size <= self.limit:
            activation.memory = self._dram.try_take(activation.nbytes, spare)
        if activation.memory is None:
            activation.memory = self._room_to_pass(size)
            activation.place, self._end = self._end, self._end + size
            reserve(self._file, self._reserved, self._end, path=self._path, field="ssd")
            self._reserved = max(self._reserved, self._end)
        landed = self._copies.out([self._view(activation)], [tensor.detach()])
        if activation.place is None:
            self._held += size
            for event in landed:  # the host waits for nothing: what reads it has the same stream
                event.wait()
        else:
            activation.written = self._disk.write(
                self._file, activation.place, activation.memory, landed
            )
            self._writing.append(activation)
        self._counts["dram" if activation.place is None else "ssd"] += activation.nbytes
        self._activations[name] = activation

    def expect_of(self, blocks: Sequence[int]) -> None:
        """Begin to read these blocks' activations from SSD, while there is room to pass through.

        They come in the order of the blocks; half of the room is left for the first ``get``.
        """
        self._reap()
        for block in blocks:
            for name, activation in self._activations.items():
                if name[0] == block and activation.memory is None:
                    size = aligned(activation.nbytes)
                    memory = self._dram.try_take(size, spare=size)
                    if memory is None:
                        return
                    self._begin_to_read(activation, memory)

    def get(self, name: Name) -> torch.Tensor:
        """Take the tensor back to the device."""
        activation = self._activations.pop(name)
        if activation.memory is None:
            self._begin_to_read(activation, self._room_to_pass(aligned(activation.nbytes)))
        with self._copies.waiting():
            if activation.read is not None:
                activation.read.result()
            elif activation.written is not None and activation in self._writing:
                activation.written.result()
                self._writing.remove(activation)
        tensor = torch.empty(activation.shape, dtype=activation.dtype, device=self._copies.device)
        self._copies.into(tensor, self._view(activation))
        for event in self._copies.used():
            event.synchronize()
        self._give_back(activation)
        return tensor

    def clear(self) -> None:
        """Forget the tensors that nobody asked for."""
        for activation in self._activations.values():
            for transfer in (activation.written, activation.read):
                if transfer is not None:
                    transfer.exception()
            if activation.memory is not None:
                self._give_back(activation)
        self._activations.clear()
        self._writing.clear()
        self._end = 0

    def _give_back(self, activation: _Activation) -> None:
        assert activation.memory is not None
        if activation.place is None:
            self._held -= aligned(activation.nbytes)
        self._dram.give_back(activation.memory)
        activation.memory = None

    def _begin_to_read(self, activation: _Activation, memory: torch.Tensor) -> None:
        assert activation.place is not None
        activation.memory = memory
        activation.read = self._disk.read(self._file, activation.place, memory, activation.checksum)

    def _view(self, activation: _Activation) -> torch.Tensor:
        assert activation.memory is not None
        return activation.memory[: activation.nbytes].view(activation.dtype).view(activation.shape)

    def _room_to_pass(self, nbytes: int) -> torch.Tensor:
        """Host memory for a while; waits for writes until there is some."""
        with self._copies.waiting():
            while (memory := self._dram.try_take(nbytes)) is None and self._writing:
                self._landed(self._writing.pop(0))
        return self._dram.take(nbytes, "an activation") if memory is None else memory

    def _reap(self) -> None:
        for activation in [a for a in self._writing if a.written and a.written.done()]:
            self._writing.remove(activation)
            self._landed(activation)

    def _landed(self, activation: _Activation) -> None:
        assert activation.written is not None
        activation.checksum = activation.written.result()
        self._give_back(activation)
