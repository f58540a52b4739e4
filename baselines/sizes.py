"""Sizes of memory as people write and read them, alike wherever there is one."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_SIZE = re.compile(r"([+-]?[\d_]*\.?\d+(?:[eE][+-]?\d+)?)\s*([kmgtKMGT]?)(i?)B")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_PREFIXES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
ALLOWED = "a number above 0 and a unit, such as 512GB, '512 GiB' or 1TB"


def parse(text: str) -> float:
    """Bytes of a size: ``512GB`` or ``1.5 TB`` of powers of 1000, ``512 GiB`` of 1024.

    Raises ``ValueError`` with the text and what is allowed.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise ValueError(f"{text!r} is not a size; allowed: {ALLOWED}")
    base = 1024 if match[3] else 1000
    return float(Decimal(match[1]) * base ** _POWERS[match[2].lower()])


def written(count: float, digits: int = 3) -> str:
    """Bytes in the largest unit that keeps them above one: ``1.26 GB``, a power of 1000."""
    suffix, size = next(((s, n) for s, n in _PREFIXES if count >= n), ("B", 1))
    value = count / size
    number = f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return f"{number} {suffix}"
