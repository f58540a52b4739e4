"""The difference of two versions of one tensor of 16-bit words, in as few bytes as it takes.

Words are subtracted as integers, which wrap: nothing is rounded, and every bit pattern is one like
another. Floating-point numbers of one sign are ordered as their bits are, so that a small update is
a small difference; one that changes its sign is large, and rare.

Chunks are coded alone, each in the form that takes the least: nothing, codes of two bits without
the words that are zero, codes of two, four or eight bits, or the new words as they are. What a
code cannot hold follows as bytes, and what a byte cannot hold as words. Near its entropy a chunk
takes a third to a half of that and up to twice as long (:mod:`fcdp.delta.gaps`). Words without an
earlier version are coded by their exponents, in fewer bits (:mod:`fcdp.delta.exponents`).
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F

from fcdp.delta import exponents, gaps
from fcdp.delta.packing import GRANULE, Bits, add, keep_changed, pack, sample, spread_changed

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
_BITS: dict[int, Bits] = {_SPARSE: 2, 2: 2, 4: 4, 8: 8}

#: How near the entropy: packed codes; entropy codes; these, of words in order of magnitude.
Coding = Literal["packed", "entropy", "ordered"]


class _Chunk(NamedTuple):
    """One row of the table that a difference begins with.

    The form is followed by counts of its parts; those of gaps are :class:`gaps.Sizes`.
    """

    form: int
    #: Words that are not zero (``_SPARSE``) or bytes of exponents; numbers that are escaped; and
    #: that no byte holds.
    words: int = 0
    escaped: int = 0
    wide: int = 0


def capacity(numel: int) -> int:
    """The most bytes that the difference of ``numel`` words takes."""
    return _table_bytes(numel) + 2 * numel


def encode(new: torch.Tensor, base: torch.Tensor | None, coding: Coding = "packed") -> torch.Tensor:
    """Encode the difference from ``base`` (n, int16) to ``new`` (n, int16), as uint8 on the host.

    Without ``base``, encode ``new`` by itself.
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
    """Apply ``encoded`` to ``base`` (n, int16) in place; return how many of its bytes were read.

    ``encoded`` (uint8) begins at a multiple of four bytes and may be longer. Raises ``ValueError``
    for what ``encode`` cannot have made.
    """
    at = _table_bytes(base.numel())
    _check(at <= encoded.numel())
    table = encoded[:at].view(torch.int32).view(-1, len(_Chunk._fields)).tolist()
    for chunk, row in zip(base.split(CHUNK), table, strict=True):
        at = _apply(_Chunk._make(row), _Reader(encoded, at), chunk)
    return at


@functools.cache
def prepare() -> None:
    """Compile the coder, or load it, before any rule measures coding: that takes seconds."""
    base = torch.zeros(GRANULE, dtype=torch.int16, device="cpu")
    new = base.clone()
    new[0] = 1
    for coding in get_args(Coding):
        apply(encode(new, base, coding), base.clone())
    apply(encode(new, None), base)


def _table_bytes(numel: int) -> int:
    chunks = max(1, -(-numel // CHUNK))  # an empty tensor is one, empty, chunk
    return chunks * len(_Chunk._fields) * 4


def _raw(new: torch.Tensor) -> tuple[_Chunk, list[torch.Tensor]]:
    return _Chunk(_RAW), [new.contiguous().view(torch.uint8)]


def _if_fewer(
    row: _Chunk, parts: Sequence[torch.Tensor], new: torch.Tensor
) -> tuple[_Chunk, list[torch.Tensor]]:
    """Make a chunk of ``parts``, or of ``new`` as it is where these take no fewer bytes."""
    body = [part.view(torch.uint8) for part in parts]
    if sum(part.numel() for part in body) % 2:
        body.append(body[-1].new_zeros(1))  # words begin at even bytes
    return (row, body) if sum(part.numel() for part in body) < 2 * new.numel() else _raw(new)


def _alone(new: torch.Tensor) -> tuple[_Chunk, list[torch.Tensor]]:
    """Encode new words by their exponents, where that takes fewer bytes."""
    if not new.numel():
        return _raw(new)
    encoded, rest = exponents.write(new)
    return _if_fewer(_Chunk(_EXPONENTS, encoded.numel()), [encoded, rest], new)


def _encode(
    new: torch.Tensor, base: torch.Tensor, coding: Coding
) -> tuple[_Chunk, list[torch.Tensor]]:
    form = _choose(new, base)
    if form == _NOTHING:
        return _Chunk(form), []
    if form == _RAW:
        return _raw(new) if coding == "packed" else _alone(new)
    if coding == "packed":
        return _if_fewer(*_by_codes(form, new, base), new)
    if coding == "entropy":
        sizes, encoded = gaps.write(new - base, window=17)
        return _if_fewer(_Chunk._make((_GAPS, *sizes)), [encoded], new)
    # In order frequencies change on the way.
    numbers = (new - base).index_select(0, gaps.by_magnitude(base))
    sizes, encoded = gaps.write(numbers, window=12)
    return _if_fewer(_Chunk._make((_ORDERED, *sizes)), [encoded], new)


def _by_codes(
    form: int, new: torch.Tensor, base: torch.Tensor
) -> tuple[_Chunk, list[torch.Tensor]]:
    bits, now, before = _BITS[form], _filled(new), _filled(base)
    codes = torch.empty(now.numel() * bits // 8, dtype=torch.uint8, device="cpu")
    near, wide = torch.empty_like(now, dtype=torch.int8), torch.empty_like(now)
    escaped, far = pack(
        now.numpy(),
        before.numpy(),
        bits,
        codes=codes.numpy(),
        near=near.numpy(),
        wide=wide.numpy(),
    )
    words, bitmap = codes.view(torch.int16), codes[:0]
    if form == _SPARSE:
        bitmap, changed = codes.new_empty(words.numel() // 8), torch.empty_like(words)
        words = changed[: keep_changed(words.numpy(), bitmap.numpy(), changed.numpy())]
    row = _Chunk(form, words.numel(), escaped=escaped, wide=far)
    # Copies: a view would keep all that there was room for until the last chunk is coded.
    return row, [bitmap, words, wide[:far].clone(), near[:escaped].clone()]


def _filled(words: torch.Tensor) -> torch.Tensor:
    """``words`` and zeros, up to a whole granule."""
    missing = -words.numel() % GRANULE
    return F.pad(words, (0, missing)) if missing else words


def _choose(new: torch.Tensor, base: torch.Tensor) -> int:
    """Choose the form that takes the fewest bytes, by a sample where that is enough."""
    # Odd: rows of a matrix, of so many words, are looked at in other columns each time.
    step = new.numel() // 8 // _SAMPLED | 1
    count, some, *beyond = sample(new.numpy(), base.numpy(), step)
    if not some and np.array_equal(new.numpy(), base.numpy()):
        return _NOTHING
    two, four, wide = (number / (8 * count) for number in beyond)
    bits = {
        _SPARSE: 1 / 8 + 2 * some / count + 8 * two,
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
        encoded, rest = reader.take(row.words, torch.uint8), reader.take(base.numel(), torch.uint8)
        _check(exponents.read(encoded, rest, base))
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
        _check(row.form in _BITS)
        _add(row, reader, base)
    return reader.at


def _add(row: _Chunk, reader: _Reader, base: torch.Tensor) -> None:
    """Add the numbers of a chunk's codes to ``base``."""
    bits = _BITS[row.form]
    count = -(-base.numel() // GRANULE) * GRANULE * bits // 16
    words = torch.zeros(count, dtype=torch.int16, device="cpu")
    if row.form == _SPARSE:
        bitmap = reader.take(words.numel() // 8, torch.uint8)
        changed = reader.take(row.words, torch.int16)
        _check(spread_changed(bitmap.numpy(), changed.numpy(), words.numpy()))
    else:
        words.copy_(reader.take(words.numel(), torch.int16))
    wide, near = reader.take(row.wide, torch.int16), reader.take(row.escaped, torch.int8)
    reader.take(row.escaped % 2, torch.int8)
    codes = words.view(torch.uint8)
    fits = add(codes.numpy(), bits, near=near.numpy(), wide=wide.numpy(), base=base.numpy())
    _check(fits)


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("a difference between versions of a shard: damaged on its way")
