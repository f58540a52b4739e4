"""The difference of two versions of one tensor of 16-bit words, in as few bytes as it takes.

Words are subtracted as integers, which wrap: nothing is rounded, and every bit pattern is one like
another. Floating-point numbers of one sign are ordered as their bits are, so that a small update is
a small difference; one that changes its sign is large, and rare.

Chunks are coded alone, each in the form that takes the least: nothing, codes of two bits without
the words that are zero, codes of two, four or eight bits, or the new words as they are. What a
code cannot hold follows as bytes, and what a byte cannot hold as words. Near its entropy a chunk
takes a third to a half of that and several times as long (:mod:`fcdp.delta.gaps`). Words of which
nothing is held before have exponents that are told in fewer bits (:mod:`fcdp.delta.exponents`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from fcdp.delta import exponents, gaps
from fcdp.delta.packing import GRANULE, Codes, pack_flags, places, unpack_flags

#: Words per chunk: what is worked on stays in a core's cache.
CHUNK = 2**19
#: Words of eight numbers that are looked at, of all of a chunk, to choose a form.
_SAMPLED = 2**10

#: Forms beside the codes' bits: two-bit codes without zero words, and new words as they are.
_NOTHING, _SPARSE, _RAW = 0, 1, 16
#: Gaps between words that are not zero: as they stand, and by the old words' magnitude.
_GAPS, _ORDERED = 3, 5
#: New words by their exponents.
_EXPONENTS = 6
_CODES = {1: Codes(2), 2: Codes(2), 4: Codes(4), 8: Codes(8)}


#: How near the entropy: packed codes; entropy codes; these, of words in order of magnitude.
Coding = Literal["packed", "entropy", "ordered"]


class _Chunk(NamedTuple):
    """One row of the table that a difference begins with.

    After the form the counts of what it has; of gaps those that they name.
    """

    form: int
    #: Words that are not zero (``_SPARSE``) or bytes of exponents; numbers that are escaped; and
    #: that no byte holds.
    words: int
    escaped: int
    wide: int


def capacity(numel: int) -> int:
    """The most bytes that the difference of ``numel`` words takes."""
    return _table_bytes(numel) + 2 * numel


def encode(new: torch.Tensor, base: torch.Tensor | None, coding: Coding = "packed") -> torch.Tensor:
    """What turns ``base`` (n, int16) to ``new`` (n, int16), as uint8; both are on the host.

    Without ``base``, what makes ``new`` of whatever there is.
    """
    rows, parts = [], []
    chunks = new.split(CHUNK)
    olds = [None] * len(chunks) if base is None else base.split(CHUNK)
    for now, before in zip(chunks, olds, strict=True):
        row, body = _alone(now) if before is None else _encode(now, before, coding)
        rows.append(row)
        parts += body
    table = torch.tensor(rows, dtype=torch.int32, device="cpu").view(torch.uint8).view(-1)
    return torch.cat([table, *parts])


def apply(encoded: torch.Tensor, base: torch.Tensor) -> int:
    """Turn ``base`` (n, int16) to what ``encoded`` was made of; returns the bytes that it took.

    ``encoded`` (uint8) begins at a multiple of four bytes and may be longer. Raises ``ValueError``
    for what ``encode`` cannot have made.
    """
    at = _table_bytes(base.numel())
    _check(at <= encoded.numel())
    table = encoded[:at].view(torch.int32).view(-1, len(_Chunk._fields)).tolist()
    for chunk, row in zip(base.split(CHUNK), table, strict=True):
        at = _apply(_Chunk(*row), _Reader(encoded, at), chunk)
    return at


def _table_bytes(numel: int) -> int:
    chunks = max(1, -(-numel // CHUNK))  # an empty tensor is one, empty, chunk
    return chunks * len(_Chunk._fields) * 4


def _raw(new: torch.Tensor) -> tuple[_Chunk, list[torch.Tensor]]:
    return _Chunk(_RAW, 0, 0, 0), [new.contiguous().view(torch.uint8)]


def _alone(new: torch.Tensor) -> tuple[_Chunk, list[torch.Tensor]]:
    """New words by their exponents, where that is less than they are."""
    if not new.numel():
        return _raw(new)
    told, rest = exponents.write(new)
    fill = rest.new_zeros((told.numel() + rest.numel()) % 2)  # words begin at even bytes
    body = [told, rest, fill]
    fewer = sum(part.numel() for part in body) < 2 * new.numel()
    return (_Chunk(_EXPONENTS, told.numel(), 0, 0), body) if fewer else _raw(new)


def _encode(
    new: torch.Tensor, base: torch.Tensor, coding: Coding
) -> tuple[_Chunk, list[torch.Tensor]]:
    numbers = new - base
    raw = _raw(new)
    if numbers.numel() % GRANULE:
        numbers = F.pad(numbers, (0, -numbers.numel() % GRANULE))
    form = _choose(numbers)
    if form == _NOTHING:
        return _Chunk(form, 0, 0, 0), []
    if form == _RAW:
        return raw if coding == "packed" else _alone(new)
    if coding != "packed":
        numbers = numbers[: new.numel()]
        if coding == "ordered":
            numbers = numbers.index_select(0, gaps.by_magnitude(base))
        # In order frequencies change on the way.
        sizes, told = gaps.write(numbers, window=12 if coding == "ordered" else 17)
        row = _Chunk(_ORDERED if coding == "ordered" else _GAPS, *sizes)
        fill = told.new_zeros(told.numel() % 2)  # words begin at even bytes
        return (row, [told, fill]) if told.numel() + fill.numel() < 2 * new.numel() else raw
    codes = _CODES[form]
    words = codes.pack(numbers)
    bitmap, kept = [], None
    if form == _SPARSE:
        flags = words.to(torch.bool)
        kept = places(flags)
        bitmap, words = [pack_flags(flags)], words.index_select(0, kept)
    at = codes.escaped(words)
    if kept is not None:
        at = kept.index_select(0, at >> 1).mul_(2).add_(at & 1)  # two bytes a word
    some = codes.of_bytes(numbers).index_select(0, at).view(torch.int16)
    escaped = _where(some, codes.escapes(some))
    near = escaped.to(torch.int8)
    far = near != escaped
    wide = _where(escaped, far)
    near.masked_fill_(far, 0)  # no escaped number is zero
    parts = [*bitmap, words, wide, near]
    row = _Chunk(form, words.numel(), near.numel(), wide.numel())
    body = [part.view(torch.uint8) for part in parts]
    if near.numel() % 2:
        body.append(body[-1].new_zeros(1))  # words begin at even bytes
    return (row, body) if sum(part.numel() for part in body) < 2 * new.numel() else raw


def _where(values: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """The ``values`` (n) whose ``flags`` (n, bool) are set, in order."""
    return values.index_select(0, places(flags))


def _choose(numbers: torch.Tensor) -> int:
    """The form whose bytes are the fewest, judged by a sample where that is enough."""
    words = numbers.view(-1, 8)
    sample = words[:: max(1, len(words) // _SAMPLED)].contiguous()
    counts = sample.view(-1).clamp(-128, 128).abs_().bincount(minlength=1).tolist()
    if counts[0] == sample.numel() and not numbers.view(torch.uint8).any():
        return _NOTHING
    beyond = [sum(counts[limit:]) / sample.numel() for limit in (2, 8, 128)]
    halves = sample.view(torch.int64)
    some = int((halves[:, 0] | halves[:, 1]).count_nonzero()) / len(sample)
    two, four, wide = beyond
    bits = {
        _SPARSE: 1 / 8 + 2 * some + 8 * two,
        2: 2 + 8 * two,
        4: 4 + 8 * four,
        8: 8 + 8 * wide,
        _RAW: 16 - 16 * wide,
    }
    return min(bits, key=lambda form: bits[form])


class _Reader:
    """Takes parts of what was encoded, one after the other."""

    def __init__(self, encoded: torch.Tensor, at: int) -> None:
        self._encoded = encoded
        self.at = at

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        begin, self.at = self.at, self.at + count * dtype.itemsize
        _check(count >= 0 and self.at <= self._encoded.numel())
        return self._encoded[begin : self.at].view(dtype)


def _apply(row: _Chunk, reader: _Reader, base: torch.Tensor) -> int:
    if row.form == _RAW:
        base.copy_(reader.take(base.numel(), torch.int16))
    elif row.form == _EXPONENTS:
        _check(row.escaped == row.wide == 0)
        told, rest = reader.take(row.words, torch.uint8), reader.take(base.numel(), torch.uint8)
        _check(exponents.read(told, rest, base))
        reader.take((row.words + base.numel()) % 2, torch.uint8)
    elif row.form in (_GAPS, _ORDERED):
        sizes = gaps.Sizes(*row[1:])
        numbers = torch.zeros_like(base)
        _check(gaps.read(sizes, reader.take(sizes.nbytes, torch.uint8), numbers))
        reader.take(sizes.nbytes % 2, torch.uint8)
        if row.form == _GAPS:
            base.add_(numbers)
        else:
            order = gaps.by_magnitude(base)
            base.index_add_(0, order, numbers)
    elif row.form != _NOTHING:
        _check(row.form in _CODES)
        base.add_(_numbers(row, reader, base.numel())[: base.numel()])
    return reader.at


def _numbers(row: _Chunk, reader: _Reader, numel: int) -> torch.Tensor:
    """The differences of a chunk, filled up to a whole granule."""
    codes = _CODES[row.form]
    count = -(-numel // GRANULE) * GRANULE // codes.per_word
    if row.form == _SPARSE:
        kept = places(unpack_flags(reader.take(count // 8, torch.uint8)))
        given = reader.take(row.words, torch.int16)
        _check(kept.numel() == row.words)
        words = torch.zeros(count, dtype=torch.int16, device="cpu").index_copy_(0, kept, given)
    else:
        words = reader.take(count, torch.int16)
    numbers = codes.unpack(words)
    wide = reader.take(row.wide, torch.int16)
    near = reader.take(row.escaped, torch.int8)
    reader.take(row.escaped % 2, torch.int8)
    at = codes.escaped(words)
    some = codes.of_bytes(numbers).index_select(0, at).view(torch.int16)
    escapes, far = places(some == -codes.limit), places(near == 0)
    _check(escapes.numel() == row.escaped and far.numel() == row.wide)
    escaped = near.to(torch.int16).index_copy_(0, far, wide)
    some.index_copy_(0, escapes, escaped)
    codes.of_bytes(numbers).index_copy_(0, at, codes.of_bytes(some))
    return numbers


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("a difference between versions of a shard: damaged on its way")
