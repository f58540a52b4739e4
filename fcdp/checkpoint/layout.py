"""Places of tensors in a folder of shards, described by plain values and tensors alone.

torch.distributed.checkpoint describes it by objects of its own, which it pickles. Here they are
built from plain values, so that nothing from disk decides what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

from fcdp.checkpoint.files import Checksum


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
            inside(file["name"]): Checksum(file["size"], file["crc32"].long().tolist())
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


def inside(name: str) -> str:
    """``name``, if it is one of something in the folder itself. Else raises ``ValueError``."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\\0"):
        raise ValueError(
            f"name = {name!r}: leads out of the checkpoint; must be a name without separators"
        )
    return name
