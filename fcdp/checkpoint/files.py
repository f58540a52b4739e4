"""Files with checksums: taken while they are written, compared before they are read."""

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
_BUFFER = 1 << 20
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
        file = _SummedFile(path, checksum)
        # torch.save writes a tensor in forty pieces of some bytes.
        with naming(path), io.BufferedWriter(file, _BUFFER) as stream:
            try:
                yield stream
            except RuntimeError as error:
                # torch.save's own, which does not say what the disk said.
                if file.failure is None:
                    raise
                raise file.failure from error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an ``OSError`` that lacks one, as errors of writing do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class _SummedFile(io.FileIO):
    """A file under way, whose checksum is taken of what is written."""

    def __init__(self, path: Path, checksum: Checksum) -> None:
        super().__init__(path, "w")
        self._checksum = checksum
        #: Error of a write, which torch.save loses on its way to the caller.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        with memoryview(data) as whole, whole.cast("B") as view:
            self._checksum.update(view[:written])
        return written


def check_files(folder: Path, sums: Mapping[str, Checksum], *, part: int, parts: int) -> None:
    """Compare one of ``parts`` equal parts of all files' bytes with their checksums.

    Parts follow the order of ``sums``, so that a rank meets mostly the file it has written. Of an
    empty file there is nothing to compare, and nothing that anybody reads.

    Raises ``ValueError`` that names the damaged files and says what is wrong with them.
    """
    blocks = [(name, block) for name in sums for block in range(len(sums[name].crcs))]
    mine = blocks[part * len(blocks) // parts : (part + 1) * len(blocks) // parts]
    damage: dict[str, str] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        results = readers.map(lambda at: _damage(folder / at[0], sums[at[0]], at[1]), mine)
        for (name, _), what in zip(mine, results, strict=True):
            if what is not None:
                damage.setdefault(name, what)
    if damage:
        shown = [f"{folder / name}: {what}" for name, what in sorted(damage.items())[:3]]
        more = f"; and {len(damage) - 3} files more" if len(damage) > 3 else ""
        raise ValueError("; ".join(shown) + more)


def _damage(path: Path, expected: Checksum, block: int) -> str | None:
    """Say what is wrong with one block of a file, or with all of it; ``None``: nothing."""
    start = block * BLOCK
    end = min(start + BLOCK, expected.size)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "is not a regular file"
        if status.st_size != expected.size:
            return f"has {status.st_size} bytes; must have {expected.size}, as saved"
        with path.open("rb") as file:
            file.seek(start)
            crc = zlib.crc32(file.read(end - start))
    except FileNotFoundError:
        return "is missing; must be on a file system that all nodes share"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if crc == expected.crcs[block]:
        return None
    return (
        f"bytes {start} to {end - 1} are not as saved: their CRC-32 is {crc:08x}; "
        f"must be {expected.crcs[block]:08x}"
    )
