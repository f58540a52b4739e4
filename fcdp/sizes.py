"""Bytes as people write and read them, alike wherever there are any. Imports no torch."""

import re
from decimal import Decimal

_SIZE = re.compile(r"(\d[\d_]*(?:\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?\s*(?:([kmgtKMGT]?)(i?)B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PREFIXES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def in_words(nbytes: int) -> str:
    """Write ``nbytes`` in the largest unit that it reaches: ``1.5 GiB``, ``512 bytes``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.4g} {unit}"
    return f"{nbytes} bytes"


def written(count: float, digits: int = 3) -> str:
    """Bytes in the largest unit that keeps them above one: ``1.26 GB``, a power of 1000."""
    suffix, size = next(((s, n) for s, n in _PREFIXES if count >= n), ("B", 1))
    value = count / size
    number = f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return f"{number} {suffix}"


def parse(text: str, least: int = 0) -> int:
    """Bytes of a size as people write it.

    Args:
        text: ``512MB`` (a power of 1000), ``1 GiB`` (one of 1024), or a number of bytes alone.
        least: the fewest bytes that are a size here.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    base = 1024 if match and match[4] else 1000
    power = _POWERS[(match[3] or "").upper()] if match else 0
    nbytes = int(Decimal(match[1] + (match[2] or "")) * base**power) if match else -1
    if nbytes < least:
        more = f", {least} or more" if least else ""
        raise ValueError(
            f"{text!r} is not a size: allowed are bytes{more}, or such as 512MB, 1 GiB"
        )
    return nbytes
