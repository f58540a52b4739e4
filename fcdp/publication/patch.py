"""A safetensors file with a checksum of all its bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch

#: Begins the name of a tensor that tells the differences of all parts of one dtype, which follows.
COMPRESSED = "__compressed__."
#: Where the checksum stands, which is taken with these digits in its place. A name or a text of the
#: header has its quotation marks escaped: nothing else there reads so.
_MARK = b'"crc32":"'
_DIGITS = b"00000000"


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


def library(need: str = "publications are safetensors files") -> Any:
    """Import safetensors, which torch does not need; ``need`` says who does."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{need}: pip install safetensors") from error
    return safetensors.torch
