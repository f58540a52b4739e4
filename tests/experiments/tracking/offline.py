"""W&B's offline files, read back as ``wandb sync`` reads them."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 2**15
#: Header of each part: checksum, length, kind of part. The file's own header is as long.
_HEAD = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


@dataclass
class Run:
    folder: Path
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)


def runs(directory: Path) -> list[Run]:
    """All runs below ``directory``/wandb, by id."""
    files = directory.glob("wandb/offline-run-*/run-*.wandb")
    return sorted(map(_read, files), key=lambda run: run.id)


def _read(file: Path) -> Run:
    run = Run(file.parent)
    for data in _records(file.read_bytes()):
        each = wandb_internal_pb2.Record()
        each.ParseFromString(data)
        match each.WhichOneof("record_type"):
            case "run":
                run.id, run.job_type = each.run.run_id, each.run.job_type
                run.name, run.group = each.run.display_name, each.run.run_group
                run.tags = [*each.run.tags]
                _update(run.config, each.run.config.update)
            case "config":
                _update(run.config, each.config.update)
            case "history":
                run.history.append(point := {})
                _update(point, each.history.item)
            case "summary":
                _update(run.summary, each.summary.update)
    return run


def _records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log: in blocks, each of which holds whole records or parts."""
    assert b":W&B".startswith(content[:4])  # what is being written may have no more yet
    position, parts = _HEAD.size, b""
    while position + _HEAD.size <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEAD.size:  # no head fits: the block is filled up
            position += left
            continue
        _, length, kind = _HEAD.unpack_from(content, position)
        position += _HEAD.size
        parts += content[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""


def _update(values: dict[str, Any], items: Any) -> None:
    """Set the value of each item, whose key may be nested."""
    for item in items:
        path = [*item.nested_key] or [item.key]
        inner = values
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = json.loads(item.value_json)
