"""Files with checksums: taken while they are written, compared before they are read."""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

#: Bytes per checksum. Ranks share the blocks of all files, however few files there are.
BLOCK = 16 << 20
_READ_AT_ONCE = 1 << 20
#: Smaller writes are over before a thread has started.
_WORTH_A_THREAD = 1 << 20
_READERS = 4


@dataclass
class Checksum:
    """Size of a file, and the CRC-32 of each of its blocks."""

    size: int = 0
    crcs: list[int] = field(default_factory=list)

    def update(self, data: memoryview) -> None:
        """Count ``data`` in, which follows what was counted before."""
        while data:
            start = self.size % BLOCK
            if start == 0:
                self.crcs.append(0)
            part = data[: BLOCK - start]
            self.crcs[-1] = zlib.crc32(part, self.crcs[-1])
            self.size += len(part)
            data = data[len(part) :]


class SummingFileSystem(FileSystem):
    """Writes files and takes their checksums on the way, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        assert mode == "wb", mode
        path = Path(path)
        checksum = self.sums[path.name] = Checksum()
        with (
            naming(path),
            ThreadPoolExecutor(1) as helper,
            _SummedFile(path, checksum, helper) as stream,
        ):
            try:
                yield stream
            except RuntimeError as error:
                # torch.save's own, which does not say what the disk said.
                if stream.failure is None:
                    raise
                raise stream.failure from error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of writing name the file, as those of opening it do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class _SummedFile(io.BufferedWriter):
    """A file under way; its checksum is taken beside the write, by a thread where that pays."""

    def __init__(self, path: Path, checksum: Checksum, helper: ThreadPoolExecutor) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._checksum = checksum
        self._helper = helper
        #: What went wrong, for callers between which and here it is lost.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        with memoryview(data) as whole, whole.cast("B") as view:
            if len(view) < _WORTH_A_THREAD:
                self._checksum.update(view)
                return self._write(view)
            summing = self._helper.submit(self._checksum.update, view)
            try:
                return self._write(view)
            finally:
                summing.result()

    def _write(self, view: memoryview) -> int:
        try:
            return super().write(view)
        except OSError as error:
            self.failure = error
            raise


def check_files(folder: Path, sums: Mapping[str, Checksum], part: int, parts: int) -> None:
    """Compare one of ``parts`` equal parts of all files' bytes with their checksums.

    Parts follow the order of ``sums``, so that a rank meets mostly the file it has written.

    Raises ``ValueError`` that names the damaged files and says what is wrong with them.
    """
    blocks = [(name, block) for name in sums for block in range(len(sums[name].crcs))]
    mine = blocks[part * len(blocks) // parts : (part + 1) * len(blocks) // parts]
    # Sizes are not left to the blocks alone: an empty file has none.
    names = sorted({*(name for name, _ in mine), *list(sums)[part::parts]})
    damage = {name: what for name in names if (what := _wrong_size(folder / name, sums[name]))}
    left = [(name, block) for name, block in mine if name not in damage]
    with ThreadPoolExecutor(_READERS) as readers:
        for (name, _), what in zip(
            left,
            readers.map(lambda at: _wrong_block(folder / at[0], sums[at[0]], at[1]), left),
            strict=True,
        ):
            if what is not None:
                damage.setdefault(name, what)
    if damage:
        shown = [f"{folder / name}: {what}" for name, what in sorted(damage.items())[:3]]
        more = f"; and {len(damage) - 3} files more" if len(damage) > 3 else ""
        raise ValueError("; ".join(shown) + more)


def _wrong_size(path: Path, expected: Checksum) -> str | None:
    """What is wrong with the file as far as its directory entry tells."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return "is missing; must be on a file system that all nodes share"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_size != expected.size:
        return f"has {found.st_size} bytes; must have {expected.size}, as saved"
    return None


def _wrong_block(path: Path, expected: Checksum, block: int) -> str | None:
    start = block * BLOCK
    end = min(start + BLOCK, expected.size)
    try:
        crc = _crc(path, start, end)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if crc != expected.crcs[block]:
        return (
            f"bytes {start} to {end - 1} are not as saved: their CRC-32 is {crc:08x}; "
            f"must be {expected.crcs[block]:08x}"
        )
    return None


def _crc(path: Path, start: int, end: int) -> int:
    crc = 0
    with memoryview(bytearray(min(_READ_AT_ONCE, end - start))) as buffer, path.open("rb", 0) as f:
        f.seek(start)
        while left := end - start:
            count = f.readinto(buffer[:left])
            if not count:  # cut since its size was asked for: the checksum will tell
                break
            crc = zlib.crc32(buffer[:count], crc)
            start += count
    return crc
