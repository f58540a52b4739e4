"""The server's files: masters, moments and parameters, in two generations of which one is whole.

A step reads the generation of the step before and writes the other; when all of it is on the disk,
one small file says so. Whatever ends the server, that file names a generation that nothing has
written to since.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import torch

from baselines.luwu.plan import Chunk, Plan
from fcdp import direct_io, durable
from fcdp.cache.arena import Arena, aligned
from fcdp.checksum import bytes_of

#: fp32 master, first and second moment.
_STATES = 3
_FP32 = torch.float32.itemsize


class Buffer:
    """Memory of one chunk on its way from file to file, aligned for direct I/O."""

    def __init__(self, plan: Plan) -> None:
        largest = max(chunk.numel for chunk in plan.all_chunks())
        self._arena = Arena(_region(largest, plan.type.itemsize), torch.device("cpu"))
        self.memory = self._arena.memory

    def states(self, numel: int) -> list[torch.Tensor]:
        """Master, first and second moment (numel, float32)."""
        step = aligned(numel * _FP32)
        parts = (self.memory[i * step : i * step + numel * _FP32] for i in range(_STATES))
        return [part.view(torch.float32) for part in parts]

    def parameters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """What workers compute with (numel, dtype)."""
        begin = _STATES * aligned(numel * _FP32)
        return self.memory[begin : begin + numel * dtype.itemsize].view(dtype)


class Files:
    """The state of all layers in one folder, opened by one server at a time."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Open or make the files.

        Raises ``ValueError`` for a folder of other layers, or one that another server has.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"folder = {str(folder)!r}: another server has it") from error
        self._type = plan.type
        _compare(folder / "layers.json", plan)
        #: Where each chunk begins in its file, of trained ones or of frozen ones.
        self._places: dict[tuple[int, int], int] = {}
        ends = {True: 0, False: 0}
        for chunk in plan.all_chunks():
            self._places[chunk.unit, chunk.index] = ends[chunk.trained]
            ends[chunk.trained] += self._size(chunk)
        there = self.step is not None
        self._generations = [_open(folder / f"generation-{i}", ends[True], there) for i in range(2)]
        self._still = _open(folder / "frozen", ends[False], there)
        #: Bytes read and written since the files were opened.
        self.read = self.written = 0
        self._counts = threading.Lock()

    @property
    def step(self) -> int | None:
        """The last complete step; ``None``: there are not even initial parameters."""
        return step_of(self._folder)

    def read_states(self, chunk: Chunk, step: int, buffer: Buffer) -> None:
        """Fill master and moments of a trained chunk after ``step``."""
        nbytes = _STATES * aligned(chunk.numel * _FP32)
        self._read(self._file(chunk, step), self._place(chunk), buffer.memory[:nbytes])

    def write(self, chunk: Chunk, step: int, buffer: Buffer) -> None:
        """Write all of a chunk as it is after ``step``: a frozen one from the buffer's start."""
        memory = buffer.memory[: self._size(chunk)]
        self._write(self._file(chunk, step), self._place(chunk), memory)

    def parameters(self, chunk: Chunk, step: int, buffer: Buffer) -> memoryview:
        """What workers compute with after ``step``, read into the buffer."""
        nbytes = chunk.numel * self._type.itemsize
        memory, place = buffer.memory[: aligned(nbytes)], self._place(chunk)
        if chunk.trained:
            place += _STATES * aligned(chunk.numel * _FP32)
        self._read(self._file(chunk, step), place, memory)
        return bytes_of(memory[:nbytes])

    def commit(self, step: int) -> None:
        """Have all that was written of ``step`` on the disk, then say so."""
        if step == 0:
            os.fsync(self._still)
        os.fsync(self._generations[step % 2])
        durable.replace(self._folder / "step.json", json.dumps({"step": step}))

    def close(self) -> None:
        """Close the files, and let another server have them."""
        for descriptor in (*self._generations, self._still):
            os.close(descriptor)
        self._lock.close()

    def _place(self, chunk: Chunk) -> int:
        return self._places[chunk.unit, chunk.index]

    def _file(self, chunk: Chunk, step: int) -> int:
        return self._generations[step % 2] if chunk.trained else self._still

    def _size(self, chunk: Chunk) -> int:
        size = self._type.itemsize
        return _region(chunk.numel, size) if chunk.trained else aligned(chunk.numel * size)

    def _read(self, file: int, offset: int, memory: torch.Tensor) -> None:
        direct_io.read_all(file, offset, memory)
        with self._counts:
            self.read += memory.nbytes

    def _write(self, file: int, offset: int, memory: torch.Tensor) -> None:
        direct_io.write_all(file, offset, memory)
        with self._counts:
            self.written += memory.nbytes


def step_of(folder: Path) -> int | None:
    """The last complete step in a server's folder; ``None`` without one."""
    file = folder / "step.json"
    if not file.exists():
        return None
    return int(json.loads(file.read_text(encoding="utf-8"))["step"])


def masters(folder: Path, plan: Plan) -> dict[str, torch.Tensor]:
    """The trained parameters in float32, by name, after the last complete step of a server's files.

    Raises ``ValueError`` for files of other layers, or of a server that runs or never began.
    """
    files = Files(folder, plan)
    try:
        step = files.step
        if step is None:
            raise ValueError(f"folder = {str(folder)!r}: has no complete step")
        buffer = Buffer(plan)
        found: dict[str, torch.Tensor] = {}
        for index, unit in enumerate(plan.units):
            parts = [torch.empty(0)]
            for chunk in plan.chunks(index):
                if chunk.trained:
                    files.read_states(chunk, step, buffer)
                    parts.append(buffer.states(chunk.numel)[0].clone())
            flat = torch.cat(parts).split([each.numel for each in unit.trained])
            for each, values in zip(unit.trained, flat, strict=True):
                found[each.name] = values.view(each.shape)
        return found
    finally:
        files.close()


def _region(numel: int, itemsize: int) -> int:
    """Bytes that a trained chunk takes in a generation."""
    return _STATES * aligned(numel * _FP32) + aligned(numel * itemsize)


def _compare(file: Path, plan: Plan) -> None:
    """Note what the files hold, or see that it is the same."""
    mine = plan.model_dump_json(include={"units", "dtype", "chunk_bytes"})
    if not file.exists():
        durable.replace(file, mine)
    elif file.read_text(encoding="utf-8") != mine:
        raise ValueError(
            f"folder = {str(file.parent)!r}: holds other layers, another type or chunk_bytes; "
            "allowed is an empty folder, or one of the same run"
        )


def _open(path: Path, nbytes: int, there: bool) -> int:
    """A file of this size, past the page cache where the file system has direct I/O.

    Raises ``ValueError`` where it should be ``there`` and is not, or has another size.
    """
    found = path.stat().st_size if path.exists() else None
    if there and found != nbytes:
        raise ValueError(
            f"{path}: {'is missing' if found is None else f'has {found} bytes'}, where a complete "
            f"step is; must have {nbytes}"
        )
    flags = os.O_RDWR | os.O_CREAT
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # tmpfs has none
        descriptor = os.open(path, flags, 0o600)
    os.ftruncate(descriptor, nbytes)
    return descriptor
