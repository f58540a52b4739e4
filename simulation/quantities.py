"""Quantities as people write and read them; each error names the value and what is allowed."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from difflib import get_close_matches
from typing import Literal, TypeVar

from fcdp.sizes import parse

_NUMBER = re.compile(r"([+-]?[\d_]*\.?\d+(?:[eE][+-]?\d+)?)\s*(.*)", re.DOTALL)
_BITS = dict.fromkeys(("bps", "bit/s", "bits/s", "b/s"), 1) | {"Bps": 8, "B/s": 8}
#: Bits per second by unit: prefixes of any case; a bit is b or bit, a byte is B.
_RATES = {
    prefix + unit: bits * 1000**power
    for power, prefixes in enumerate(("", "kK", "mM", "gG", "tT"))
    for prefix in prefixes or ("",)
    for unit, bits in _BITS.items()
}
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_HOURS = {"m": 1 / 60, "h": 1, "d": 24}
_LORA = re.compile(r"lora:(\d+)")
#: A comma that is not inside brackets.
_COMMA = re.compile(r",(?![^(]*\))")

#: A link that nothing limits.
UNSHAPED = "unshaped"
_LINK_SCALES = (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3), ("bit/s", 1))

_T = TypeVar("_T")


def bits_per_s(option: str, text: str) -> float:
    """Bits per second of a bandwidth: ``100Gbps``, ``100 Gbit/s``, ``12.5 GB/s``.

    Raises ``ValueError`` naming ``option``, as the other functions here do.
    """
    allowed = "a number above 0 and a unit, such as 100Gbps, '100 Gbit/s' or 12.5GB/s"
    return _scaled(option, text, _RATES, allowed)


def link(text: object) -> int | None:
    """Bits per second of a link such as ``10 Mbit/s``; ``None`` for ``unshaped``.

    Raises ``ValueError`` for what is no bandwidth, or no whole number of bits per second.
    """
    if text == UNSHAPED:
        return None
    allowed = f"a number above 0 and a unit, such as '10 Mbit/s', or {UNSHAPED!r}"
    try:
        bits = bits_per_s("bandwidth", str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a bandwidth; allowed: {allowed}") from None
    if bits != int(bits):
        raise ValueError(
            f"{text!r} is not a whole number of bits per second above zero; "
            f"a link without a limit is {UNSHAPED!r}"
        )
    return int(bits)


def format_link(bits: float | None) -> str:
    """A link's limit as matrix files write it, in the largest unit that keeps it above one."""
    if bits is None or math.isnan(bits):
        return UNSHAPED
    suffix, size = next((u, s) for u, s in _LINK_SCALES if bits >= s or s == 1)
    return f"{(Decimal(bits) / size).normalize():f} {suffix}"


def size_bytes(option: str, text: str, least: int = 1) -> int:
    """Bytes of a size of memory, the ``least`` or more: ``512GB``, ``512 GiB``, ``1TB``."""
    try:
        return parse(text, least)
    except ValueError:
        allowed = f"bytes, {least:,} or more, or such as 512MB, 1 GiB"
        raise _mistake(option, text, allowed) from None


def format_rate(bits_per_s: float) -> str:
    """A bandwidth that was reached, to three digits: ``99.5 Gbit/s``."""
    suffix, size = next((u, s) for u, s in _LINK_SCALES if bits_per_s >= s or s == 1)
    value = bits_per_s / size
    return f"{value:,.0f} {suffix}" if value >= 100 else f"{value:.3g} {suffix}"


def count(option: str, text: str) -> float:
    """A large number: ``1e9``, ``1B``, ``300M``."""
    allowed = "a number above 0, such as 1e9, 1B or 300M"
    return _scaled(option, text, _COUNTS, allowed)


def whole(option: str, text: str) -> int:
    """A whole number, 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise _mistake(option, text, "whole numbers, 1 or more")
    return int(text)


def checkpointing(option: str, text: str) -> float | Literal["selective"]:
    """A share of the blocks that are recomputed, or ``selective``."""
    if text.strip() == "selective":
        return "selective"
    with suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise _mistake(option, text, "numbers from 0 to 1, and selective")


def hours(option: str, text: str) -> float:
    """Hours of a time: ``24h``, ``90m``, ``3d``."""
    allowed = "a number above 0 and a unit, such as 24h, 90m or 3d"
    return _scaled(option, text, _HOURS, allowed)


def lora_rank(option: str, text: str) -> int:
    """The rank of ``lora:RANK``."""
    match = _LORA.fullmatch(text.strip())
    if match is None or int(match[1]) < 1:
        raise _mistake(option, text, "lora:RANK, such as lora:8")
    return int(match[1])


def each(option: str, text: str, parse: Callable[[str, str], _T]) -> tuple[_T, ...]:
    """The parsed values of a list with commas, each once."""
    return tuple(dict.fromkeys(parse(option, part) for part in items(text)))


def items(text: str) -> list[str]:
    """Items with commas between them; one in brackets is part of its item."""
    return _COMMA.split(text)


def name(option: str, text: str) -> str:
    """A name in a list; the caller checks whether it exists."""
    if not text.strip():
        raise _mistake(option, text, "names with commas between them")
    return text.strip()


def choice(item: object, allowed: Iterable[str], others: str = "") -> str:
    """Words for an item that is none of these: the closest of them, if any, and all."""
    names = list(allowed)
    close = get_close_matches(str(item), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{item!r}{hint} allowed: {', '.join(names)}{others}"


def _scaled(option: str, text: str, scales: Mapping[str, float], allowed: str) -> float:
    """A finite number above 0 in one of these units."""
    match = _NUMBER.fullmatch(text.strip())
    if not match or match[2] not in scales or not 0 < float(match[1]) < math.inf:
        raise _mistake(option, text, allowed)
    return float(Decimal(match[1]) * Decimal(scales[match[2]]))


def _mistake(option: str, text: str, allowed: str) -> ValueError:
    return ValueError(f"{option} = {text!r}: allowed: {allowed}")
