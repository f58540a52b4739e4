"""Bytes of what is quantised to travel, by the names that matrix files use, without torch.

The library's codecs (``fcdp.codec``) say the same of themselves; a test compares both. A plan must
not wait seconds for torch to multiply two numbers.
"""

from __future__ import annotations

import re

_CALL = re.compile(r"(int8|int4)(?:\((\d+)\))?")
#: Bits of a value and values of a block where the text names none, by codec.
_BITS = {"int8": 8, "int4": 4}
_BLOCKS = {"int8": 256, "int4": 64}
_SCALE_BYTES = 4


def encoded_bytes(codec: str, numel: int) -> int:
    """Bytes of so many values: their codes, and an fp32 scale for each block.

    Raises ``ValueError`` for a codec that does not exist.
    """
    match = _CALL.fullmatch(codec)
    if match is None or match[2] == "0":
        raise ValueError(f"codec = {codec!r}: allowed are none, int8, int4, int8(128) for a block")
    block = _BLOCKS[match[1]] if match[2] is None else int(match[2])
    return -(-numel * _BITS[match[1]] // 8) + -(-numel // block) * _SCALE_BYTES
