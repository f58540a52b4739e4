"""What crosses nodes, parsed from the names that matrix files use."""

from __future__ import annotations

from collections.abc import Callable

import fcdp
from baselines.encoding import DIFFERENCES, quantiser

_KINDS: dict[str, Callable[..., fcdp.Codec]] = {"int8": fcdp.BlockInt8, "int4": fcdp.BlockInt4}


def gather(text: str) -> fcdp.Codec | fcdp.Delta | None:
    """What gathers are encoded with: as :func:`parse`, or lossless differences.

    ``delta`` tells them where that pays, ``delta(always)`` always.
    """
    if text in DIFFERENCES:
        return fcdp.Delta("always" if "always" in text else "pays")
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{error}, and delta") from None


def parse(text: str) -> fcdp.Codec | None:
    """The codec of a text: ``none``, ``int8``, ``int4``, or ``int8(128)`` for blocks of 128 values.

    Raises ``ValueError`` for anything else.
    """
    if text == "none":
        return None
    kind, block = quantiser(text)
    make = _KINDS[kind]
    return make() if block is None else make(block)
