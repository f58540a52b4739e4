"""Bytes as people read them."""

from __future__ import annotations


def in_words(nbytes: int) -> str:
    """``nbytes`` in the largest unit of which there is one at least."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 2**power:
            return f"{nbytes / 2**power:.4g} {unit}"
    return f"{nbytes} bytes"
