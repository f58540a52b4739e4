"""Where publications lie: a folder, or anything that fsspec names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import fsspec
from fsspec.implementations.local import LocalFileSystem

from fcdp import durable

#: Full values of what is trained, what leads to a version from the one before, and full values of
#: what is frozen: the folders of a place.
Kind = Literal["anchors", "deltas", "frozen"]

_NAME = re.compile(r"step_(\d{6,})-(\d{5,})-of-(\d{5,})\.safetensors")


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
    """Files are there whole or not at all, whenever their writers are killed."""

    def __init__(self, name: str | os.PathLike[str]) -> None:
        self.name = os.fspath(name)
        self._files, self._root = fsspec.core.url_to_fs(self.name)
        self._local = isinstance(self._files, LocalFileSystem)

    def path(self, file: File) -> str:
        return f"{self._root}/{file}"

    def write(self, file: File, data: bytes) -> None:
        """Have a file. In object stores it is there with its last byte; else by being renamed."""
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
            if found := _NAME.fullmatch(str(path).rpartition("/")[2]):
                version, part, parts = map(int, found.groups())
                yield File(kind, version, part - 1, parts)

    def whole(self, kind: Kind) -> dict[int, list[File]]:
        """All parts of each version of which there are all, in order."""
        by_version: dict[int, list[File]] = {}
        for file in sorted(self.files(kind)):
            by_version.setdefault(file.version, []).append(file)
        return {
            version: files
            for version, files in by_version.items()
            if [file.part for file in files] == [*range(files[0].parts)]
        }

    def highest(self) -> int:
        """The highest version of which there is anything, or zero."""
        return max(
            (file.version for kind in get_args(Kind) for file in self.files(kind)), default=0
        )
