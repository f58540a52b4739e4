"""Files of a publication: parts of tensors, in files with checksums, in a place.

A file is one of safetensors, with a checksum of all its bytes in its header. A place is a folder,
or anything that fsspec names.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from fcdp import durable, optional

#: Integers as wide as the elements of a tensor: what is compared are bits.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Prefix of a tensor that encodes the differences of all parts of one dtype, whose name follows.
COMPRESSED = "__compressed__."
#: Where the checksum stands, which is taken with these digits in its place. A name or a text of the
#: header has its quotation marks escaped: nothing else there reads so.
_MARK = b'"crc32":"'
_DIGITS = b"00000000"
#: Full values of what is trained, differences from the version before, and full values of what is
#: frozen: the folders of a place.
Kind = Literal["anchors", "deltas", "frozen"]

_NAME = re.compile(r"step_(\d{6,})-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class Part:
    """A block of a tensor: its name, the whole shape, and where in it the block lies."""

    name: str
    shape: tuple[int, ...]
    _: KW_ONLY
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def flat(self, places: torch.Tensor) -> torch.Tensor:
        """Places (k) of the block, as if it were flat, in the whole flat tensor."""
        if not self.shape:
            return places
        within = torch.unravel_index(places, self.sizes)
        total = torch.zeros_like(places)
        for size, offset, at in zip(self.shape, self.offsets, within, strict=True):
            total.mul_(size).add_(at + offset)
        # As vLLM and TRL have them, where that is enough.
        return total.to(torch.int32) if math.prod(self.shape) <= 2**31 else total

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block of a whole tensor: a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole


def words(values: torch.Tensor) -> torch.Tensor:
    """The bits of contiguous ``values``, one integer each."""
    return values.view(_WORDS[values.itemsize])


def flattened(blocks: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A copy of the blocks in host memory, one after the other."""
    return torch.cat([block.detach().to("cpu", dtype).reshape(-1) for block in blocks])


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes. Raises ``ImportError`` without safetensors."""
    data = library().save(dict(tensors), {**metadata, "crc32": _DIGITS.decode()})
    at = data.index(_MARK) + len(_MARK)
    return b"".join((data[:at], b"%08x" % zlib.crc32(data), data[at + len(_DIGITS) :]))


def unpack(data: bytes, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata. Raises ``ValueError`` if that is not what was packed."""
    at = data.find(_MARK) + len(_MARK)
    rest = at + len(_DIGITS)
    view = memoryview(data)
    crc = zlib.crc32(view[rest:], zlib.crc32(_DIGITS, zlib.crc32(view[:at])))
    if (expected := b"%08x" % crc) != data[at:rest]:
        raise ValueError(
            f"{name}: damaged: the CRC-32 of its {len(data)} bytes is {expected.decode()}; "
            f"must be {data[at:rest].decode(errors='replace')}, as published"
        )
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return library().load(data), header["__metadata__"]


def library() -> Any:
    """Import what writes and reads the files."""
    return optional.safetensors("publications are safetensors files")


class File(NamedTuple):
    """One rank's part of a version."""

    kind: Kind
    version: int
    part: int
    parts: int

    def __str__(self) -> str:
        number = f"{self.version:06d}-{self.part + 1:05d}-of-{self.parts:05d}"
        return f"{self.kind}/step_{number}.safetensors"


class Place:
    """A folder or URL where files are whole or missing, whenever their writers are killed."""

    def __init__(self, name: str | os.PathLike[str]) -> None:
        self.name = os.fspath(name)
        self._files, self._root = fsspec.core.url_to_fs(self.name)
        self._local = isinstance(self._files, LocalFileSystem)

    def path(self, file: File) -> str:
        return f"{self._root}/{file}"

    def write(self, file: File, data: bytes) -> None:
        """Write a file. In object stores it is there with its last byte; else by a rename."""
        folder = f"{self._root}/{file.kind}"
        self._files.makedirs(folder, exist_ok=True)
        if self._local:
            durable.replace(Path(self.path(file)), data)
            return
        with self._files.transaction, self._files.open(self.path(file), "wb") as stream:
            stream.write(data)

    def read(self, file: File) -> bytes:
        return bytes(self._files.cat_file(self.path(file)))

    def files(self, kind: Kind) -> Iterator[File]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self._root}/{kind}", detail=False)
        except FileNotFoundError:
            return
        for path in paths:
            if match := _NAME.fullmatch(str(path).rpartition("/")[2]):
                version, part, parts = map(int, match.groups())
                yield File(kind, version, part=part - 1, parts=parts)

    def complete_versions(self, kind: Kind) -> dict[int, list[File]]:
        """Return the files of each version whose parts all exist, in the order of its parts."""
        by_version: dict[int, list[File]] = {}
        for file in sorted(self.files(kind)):
            by_version.setdefault(file.version, []).append(file)
        return {
            version: files
            for version, files in by_version.items()
            if [file.part for file in files] == [*range(files[0].parts)]
        }

    def highest(self) -> int:
        """Return the highest version that has any file, or zero."""
        return max(
            (file.version for kind in get_args(Kind) for file in self.files(kind)), default=0
        )
