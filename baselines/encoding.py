"""Names of codecs in matrix files, and the bytes of values as they travel.

Torch is imported where a codec is made: a plan must not wait seconds for it to multiply two
numbers. A test compares the bytes with those that the library's codecs (``fcdp.codec``) say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import fcdp

#: Gathers' lossless codecs by their names in matrix files, and when each codes differences.
DIFFERENCES: Mapping[str, Literal["pays", "always", "smallest"]] = {
    "delta": "pays",
    "delta(always)": "always",
    "delta(smallest)": "smallest",
}
#: Names of reductions' lossless codecs.
EXPONENTS = ("exact", "exact(always)")

_QUANTISER = re.compile(r"(int8|int4)(?:\((\d+)\))?")
#: Bits of a value and values of a block where the text names none, by codec.
_BITS = {"int8": 8, "int4": 4}
_BLOCKS = {"int8": 256, "int4": 64}
_SCALE_BYTES = 4


def encoded_bytes(codec: str, numel: int) -> int:
    """Bytes of so many values: their codes, and an fp32 scale for each block.

    Raises ``ValueError`` for a codec that does not exist.
    """
    kind, block = _quantiser(codec)
    return -(-numel * _BITS[kind] // 8) + -(-numel // block) * _SCALE_BYTES


def gather(text: str) -> fcdp.Codec | fcdp.Delta | None:
    """The codec of gathers: as :func:`parse`, or lossless differences.

    ``delta`` codes them where that pays, ``delta(always)`` always, ``delta(smallest)`` in the
    fewest bytes.
    """
    if text in DIFFERENCES:
        return fcdp.Delta(DIFFERENCES[text])
    return parse(text, ", and delta")


def reduction(text: str) -> fcdp.Codec | fcdp.Exact | None:
    """The codec of reductions: as :func:`parse`, or exponents alone, exactly.

    ``exact`` codes them where that pays, ``exact(always)`` always.
    """
    if text in EXPONENTS:
        return fcdp.Exact("always" if "always" in text else "pays")
    return parse(text, ", and exact")


def parse(text: str, others: str = "") -> fcdp.Codec | None:
    """The codec of a text: ``none``, ``int8``, ``int4``, or ``int8(128)`` for blocks of 128 values.

    Raises ``ValueError`` for anything else, which ends with the ``others`` that are allowed too.
    """
    if text == "none":
        return None
    kind, block = _quantiser(text, others)
    return fcdp.BlockInt8(block) if kind == "int8" else fcdp.BlockInt4(block)


def _quantiser(text: str, others: str = "") -> tuple[str, int]:
    """The codec that a text names, and the values of a block."""
    match = _QUANTISER.fullmatch(text)
    if match is None or match[2] == "0":
        allowed = f"none, int8, int4, int8(128) for a block{others}"
        raise ValueError(f"codec = {text!r}: allowed are {allowed}")
    return match[1], int(match[2] or _BLOCKS[match[1]])
