"""Small numbers of which many are zero, in hardly more bytes than their entropy.

Each number that is not zero is one byte: how many zeros are before it, and whether it is 1, −1 or
another, which follows. Huffman codes make of these bytes what their frequencies allow: where few
words change as where most do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fcdp.delta import huffman
from fcdp.delta.packing import order_of, places

#: Zeros that one byte tells of. A byte more tells of as many runs of so many.
_RUN = 64
#: The two lowest bits of a byte: 1, −1, a number that follows, and no number but only zeros.
_ONE, _MINUS_ONE, _OTHER, _ZEROS = range(4)


class Sizes(NamedTuple):
    """Counts that a reader needs."""

    tokens: int
    #: Numbers that are neither 0 nor ±1.
    others: int
    #: Bytes of all that was written.
    nbytes: int


def write(numbers: torch.Tensor, window: int) -> tuple[Sizes, torch.Tensor]:
    """``numbers`` (n, int16), of which one at least is not zero, as bytes (uint8).

    ``window`` is that of :func:`huffman.write`.
    """
    at = places(numbers.to(torch.bool))  # compared, it takes eight times as long
    values = numbers.index_select(0, at)
    gaps = at.to(torch.int32)
    gaps[1:] -= gaps[:-1].clone()
    gaps[0] += 1
    gaps -= 1
    one, minus_one = ((values == value).view(torch.uint8) for value in (1, -1))
    kinds = (_OTHER - minus_one).sub_(one, alpha=_OTHER)
    tokens = gaps.bitwise_and(_RUN - 1).to(torch.uint8) << 2 | kinds
    some = places(gaps >= _RUN)
    if some.numel():
        tokens = _with_zeros(tokens, some, gaps.index_select(0, some) // _RUN)
    others = values.index_select(0, places(kinds == _OTHER))
    near = others.to(torch.int8)
    far = near != others
    wide = others.index_select(0, places(far))
    near.masked_fill_(far, 0)  # no other number is zero
    data = huffman.write([tokens, near, wide], window)
    return Sizes(tokens.numel(), near.numel(), data.numel()), data


def _with_zeros(tokens: torch.Tensor, some: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
    """``tokens`` and, before ``some`` of them, what tells of so many ``runs`` of zeros more."""
    before = torch.zeros(tokens.numel(), dtype=torch.int32, device="cpu")
    before[some] = (runs + (_RUN - 1)) // _RUN
    ends = torch.cumsum(before + 1, 0) - 1
    full = _ZEROS | _RUN - 1 << 2
    all_of_them = tokens.new_full((int(ends[-1]) + 1,), full)
    all_of_them[ends] = tokens
    last = _ZEROS | (runs - 1).bitwise_and(_RUN - 1) << 2
    all_of_them[ends.index_select(0, some) - 1] = last.to(torch.uint8)
    return all_of_them


def read(sizes: Sizes, data: torch.Tensor, numbers: torch.Tensor) -> bool:
    """Set of ``numbers`` (n, int16, all zero) those that ``data`` (uint8) tells of.

    Returns whether ``write`` can have made it; if not, ``numbers`` is undefined.
    """
    tokens, others, _ = sizes
    if not (0 < tokens <= numbers.numel() and 0 <= others <= tokens):
        return False
    told = huffman.read(data, tokens + 3 * others)
    wide_bytes = -1 if told is None else told.numel() - tokens - others
    if told is None or wide_bytes < 0:
        return False
    codes, near, wide = told.split([tokens, others, wide_bytes])
    kinds = codes & 3
    counts = codes.to(torch.int64) >> 2
    steps = torch.where(kinds == _ZEROS, _RUN * (counts + 1), counts + 1)
    ends = torch.cumsum(steps, 0)
    some = places(kinds != _ZEROS)
    at = ends.index_select(0, some) - 1
    if int(ends[-1]) > numbers.numel():
        return False
    kinds = kinds.index_select(0, some)
    other, far = kinds == _OTHER, near == 0
    if int(other.sum()) != others or 2 * int(far.sum()) != wide_bytes:
        return False
    values = 1 - 2 * kinds.to(torch.int16)
    known = near.view(torch.int8).to(torch.int16)
    known.masked_scatter_(far, wide.clone().view(torch.int16))
    numbers.index_copy_(0, at, values.masked_scatter_(other, known))
    return True


def by_magnitude(words: torch.Tensor) -> torch.Tensor:
    """The order of ``words`` (n, int16) by what they are of numbers: exponents, the sign left out.

    What an update changes depends on how large it is against the number: words of one exponent,
    one after the other, have frequencies of their own.
    """
    return order_of((words >> 7).to(torch.uint8))
