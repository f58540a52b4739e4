"""Bytes as people write and read them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtKMGT]?)(i?)B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def in_words(nbytes: int) -> str:
    """``nbytes`` in the largest unit of which there is one at least: ``1.5 GiB``, ``512 bytes``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.4g} {unit}"
    return f"{nbytes} bytes"


def parse(text: str) -> int:
    """Bytes of a size as people write it.

    Args:
        text: ``512MB`` (a power of 1000), ``1 GiB`` (one of 1024), or a number alone.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size: allowed are bytes, or such as 512MB, 1 GiB")
    power = _POWERS[(match[2] or "").upper()]
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
