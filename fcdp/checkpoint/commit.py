"""``state.pt``, the file whose presence makes a checkpoint one.

A zip archive, as ``torch.save`` writes it, with a checksum of all its bytes in the place that the
format has for a comment.

torch.distributed.checkpoint describes a folder of shards by objects of its own, which it pickles.
Here they are built from plain values and tensors, so that nothing from disk decides what runs.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fcdp import durable
from fcdp.checkpoint.files import Checksum, naming
from fcdp.durable import COMMIT

_FORMAT = 2


@dataclass(frozen=True)
class Layout:
    """The files of a folder of shards, and where in them the chunks of each tensor lie."""

    files: dict[str, Checksum]
    #: As torch.distributed.checkpoint has it; nothing but tensors.
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, Any]:
        """Data type, size and chunks by key: ``TensorStorageMetadata``."""
        return self.metadata.state_dict_metadata

    def plain(self) -> dict[str, Any]:
        """The same by dicts, strings, numbers and tensors; :meth:`from_plain` reverses it."""
        numbers = {name: number for number, name in enumerate(self.files)}
        return {
            "files": [
                {"name": name, "size": file.size, "crc32": torch.tensor(file.crcs, device="cpu")}
                for name, file in self.files.items()
            ],
            "tensors": {
                key: {
                    "dtype": tensor.properties.dtype,
                    "size": list(tensor.size),
                    "chunks": self._rows(key, tensor, numbers),
                }
                for key, tensor in self.tensors.items()
            },
        }

    def _rows(
        self, key: str, tensor: TensorStorageMetadata, numbers: Mapping[str, int]
    ) -> torch.Tensor:
        """A row per chunk: number of the file, offset, length; offsets and sizes in the tensor."""
        rows = []
        for chunk in tensor.chunks:
            place = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            file = numbers[place.relative_path]
            rows.append([file, place.offset, place.length, *chunk.offsets, *chunk.sizes])
        return torch.tensor(rows, dtype=torch.int64, device="cpu")

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Layout:
        """Raises ``ValueError`` for a file outside the folder."""
        files = {
            _inside(file["name"]): Checksum(file["size"], file["crc32"].long().tolist())
            for file in plain["files"]
        }
        names = list(files)
        metadata = Metadata({}, storage_data={})
        for key, tensor in plain["tensors"].items():
            chunks = []
            for file, start, length, *rest in tensor["chunks"].tolist():
                dimensions = len(rest) // 2
                offsets, sizes = torch.Size(rest[:dimensions]), torch.Size(rest[dimensions:])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                place = _StorageInfo(names[file], start, length)
                metadata.storage_data[MetadataIndex(key, offsets)] = place
            metadata.state_dict_metadata[key] = TensorStorageMetadata(
                TensorProperties(tensor["dtype"]), torch.Size(tensor["size"]), chunks
            )
        return cls(files, metadata)


@dataclass(frozen=True)
class Commit:
    """Contents of ``state.pt``."""

    #: Name of the folder of shards.
    shards: str
    layout: Layout
    #: Entries of the model's state dict that are no tensors.
    model: dict[str, Any]
    optimizer: SavedOptimizer
    extra: Any

    def write(self, directory: Path) -> None:
        """Complete a save whose shards are on disk: all at once, or not at all."""
        state = {
            "format": _FORMAT,
            "shards": self.shards,
            "layout": self.layout.plain(),
            "model": self.model,
            "optimizer": vars(self.optimizer),
            "extra": self.extra,
        }
        archive = io.BytesIO()
        torch.save(state, archive)
        with naming(directory / COMMIT):
            durable.replace(directory / COMMIT, _sealed(archive.getvalue()))

    @classmethod
    def parse(cls, data: bytes, path: Path) -> Commit:
        """Raises ``ValueError`` for bytes of ``path`` that :meth:`write` did not write."""
        durable.unsealed(data, path)
        try:
            # Whoever writes files can write checksums too: nothing but tensors and plain
            # containers is unpickled.
            state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            if state["format"] != _FORMAT:
                raise ValueError(f"format = {state['format']!r}: must be {_FORMAT}")
            return cls(
                shards=_inside(state["shards"]),
                layout=Layout.from_plain(state["layout"]),
                model=dict(state["model"]),
                optimizer=SavedOptimizer(**state["optimizer"]),
                extra=state["extra"],
            )
        except Exception as error:  # there is no end to what garbage can raise
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path}: is not what fcdp.save writes: {why}") from error


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's state, with names for parameters."""

    #: Module and name of its class.
    kind: str
    #: By parameter and entry; None where it is a tensor, which the shards hold.
    state: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]

    def __post_init__(self) -> None:
        known = {name for group in self.param_groups for name in group["params"]}
        if unknown := sorted(set(self.state) - known):
            raise ValueError(f"optimizer.state: of {unknown[0]}, which is in no parameter group")

    @classmethod
    def united(cls, parts: Sequence[SavedOptimizer]) -> SavedOptimizer:
        """The optimizer of all parameters, of optimizers with equal settings of a part of them."""
        groups = []
        for same in zip(*(part.param_groups for part in parts), strict=True):
            names = chain.from_iterable(group["params"] for group in same)
            groups.append({**same[0], "params": [*dict.fromkeys(names)]})
        state = {name: state for part in parts for name, state in part.state.items()}
        return cls(parts[0].kind, state, groups)


def read_commit(directory: Path) -> bytes:
    """Read the commit. Raises ``ValueError`` if ``state.pt`` is missing or unreadable."""
    path = directory / COMMIT
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is not a regular file; must be one that fcdp.save wrote")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"directory = {directory}: holds no complete checkpoint ({COMMIT} is missing); "
            "must be one that fcdp.save wrote, on a file system that all nodes share"
        ) from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``state`` in host memory, as it will come back from disk.

    Raises ``ValueError`` for what could not be read back without unpickling code.
    """
    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
        file.seek(0)
        copy: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
    except (UnpicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "extra (or what the model and the optimizer keep beside tensors): must be tensors, "
            f"numbers, strings, None, and lists, tuples and dicts of these: {error}"
        ) from error
    return copy


def _sealed(archive: bytes) -> bytes:
    """``archive`` with a seal as the zip file's comment."""
    assert archive[-2:] == b"\0\0", "torch.save writes archives without a comment"
    return durable.sealed(archive[:-2] + durable.SEAL_BYTES.to_bytes(2, "little"))


def _inside(name: str) -> str:
    """``name``, if it is one of something in the folder itself. Else raises ``ValueError``."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(
            f"name = {name!r}: leads out of the checkpoint; must be a name without separators"
        )
    return name
