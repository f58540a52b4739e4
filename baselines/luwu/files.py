"""The server's files: masters, moments and parameters, in two generations of which one is whole."""

import threading
import zlib
from pathlib import Path

import torch

from baselines.generations import Generations, Region
from baselines.luwu.plan import Chunk, Plan
from fcdp import direct_io
from fcdp.arena import Arena, aligned
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
        """Values that workers compute with (numel, dtype)."""
        begin = _STATES * aligned(numel * _FP32)
        return self.memory[begin : begin + numel * dtype.itemsize].view(dtype)


class Files:
    """The state of all layers in one folder, opened by one server at a time.

    Who reads a chunk, or writes one, waits until it may.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        """Open or make the files.

        Raises ``ValueError`` for a folder of other layers, or one that another server has.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._type = plan.type
        regions = {c.key: Region(self._size(c), c.trained) for c in plan.all_chunks()}
        layers = plan.model_dump_json(include={"layers", "dtype", "chunk_bytes"})
        about = f"{zlib.crc32(layers.encode()):08x}"
        self._state = Generations(folder, "folder", regions, about=about, direct=False)
        #: Bytes read and written since the files were opened.
        self.read = self.written = 0
        self._counts = threading.Lock()

    @property
    def step(self) -> int | None:
        """The last complete step; ``None``: there are not even initial parameters."""
        return self._state.step

    def read_states(self, chunk: Chunk, step: int, buffer: Buffer) -> None:
        """Fill master and moments of a trained chunk after ``step``."""
        nbytes = _STATES * aligned(chunk.numel * _FP32)
        self._read(chunk, step, 0, buffer.memory[:nbytes])

    def parameters(self, chunk: Chunk, step: int, buffer: Buffer) -> memoryview:
        """Values that workers compute with after ``step``, read into the buffer."""
        nbytes = chunk.numel * self._type.itemsize
        memory = buffer.memory[: aligned(nbytes)]
        self._read(chunk, step, self._size(chunk) - memory.nbytes, memory)
        return bytes_of(memory[:nbytes])

    def write(self, chunk: Chunk, step: int, buffer: Buffer) -> bool:
        """Write all of a chunk as it is after ``step``: a frozen one from the buffer's start.

        Returns whether that completes the step, all of which is on the disk then.
        """
        place = self._state.room(chunk.key, step)
        self._write(place, buffer.memory[: self._size(chunk)])
        complete = self._state.note(chunk.key)
        if complete:
            self._state.commit(step)
        return complete

    def end(self) -> None:
        """Fail all that wait for a chunk."""
        self._state.fail(RuntimeError("the run has ended"))

    def close(self) -> None:
        self._state.close()

    def _size(self, chunk: Chunk) -> int:
        size = self._type.itemsize
        return _region(chunk.numel, size) if chunk.trained else aligned(chunk.numel * size)

    def _read(self, chunk: Chunk, step: int, begin: int, memory: torch.Tensor) -> None:
        place, _ = self._state.find(chunk.key, step)
        direct_io.read_all(self._state.file.descriptor, place + begin, memory)
        with self._counts:
            self.read += memory.nbytes

    def _write(self, place: int, memory: torch.Tensor) -> None:
        direct_io.write_all(self._state.file.descriptor, place, memory)
        with self._counts:
            self.written += memory.nbytes


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
        by_name: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(plan.layers):
            parts = [torch.empty(0)]
            for chunk in plan.chunks(index):
                if chunk.trained:
                    files.read_states(chunk, step, buffer)
                    parts.append(buffer.states(chunk.numel)[0].clone())
            flat = torch.cat(parts).split([parameter.numel for parameter in layer.trained])
            for parameter, values in zip(layer.trained, flat, strict=True):
                by_name[parameter.name] = values.view(parameter.shape)
        return by_name
    finally:
        files.close()


def _region(numel: int, itemsize: int) -> int:
    """Bytes that a trained chunk takes in a generation."""
    return _STATES * aligned(numel * _FP32) + aligned(numel * itemsize)
