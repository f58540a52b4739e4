"""How parameters and gradients are told of in matrix files, and their bytes as they travel.

Without torch: a plan must not wait seconds for it to multiply two numbers. The library's codecs
(``fcdp.codec``) say the same bytes of themselves; a test compares both.
"""

from __future__ import annotations

import re

#: Names of what gathers are told with in matrix files that rounds nothing.
DIFFERENCES = ("delta", "delta(always)")

_QUANTISER = re.compile(r"(int8|int4)(?:\((\d+)\))?")
#: Bits of a value and values of a block where the text names none, by codec.
_BITS = {"int8": 8, "int4": 4}
_BLOCKS = {"int8": 256, "int4": 64}
_SCALE_BYTES = 4


def quantiser(text: str) -> tuple[str, int | None]:
    """The codec that a text names, and the values of a block where it says so: ``int8(128)``.

    Raises ``ValueError`` for anything else.
    """
    match = _QUANTISER.fullmatch(text)
    if match is None or match[2] == "0":
        raise ValueError(f"codec = {text!r}: allowed are none, int8, int4, int8(128) for a block")
    return match[1], None if match[2] is None else int(match[2])


def encoded_bytes(codec: str, numel: int) -> int:
    """Bytes of so many values: their codes, and an fp32 scale for each block.

    Raises ``ValueError`` for a codec that does not exist.
    """
    kind, said = quantiser(codec)
    block = said or _BLOCKS[kind]
    return -(-numel * _BITS[kind] // 8) + -(-numel // block) * _SCALE_BYTES
