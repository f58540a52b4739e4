"""Codes and flags come back from their words; each form of a chunk is taken where it is least."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.delta import difference, packing
from fcdp.delta.packing import GRANULE, Codes, pack_flags, places, unpack_flags

BITS: Any = pytest.mark.parametrize("bits", [2, 4, 8])


@BITS
def test_every_number_comes_back_from_every_place_or_is_escaped(bits: Any) -> None:
    codes = Codes(bits)
    limit = 2 ** (bits - 1)
    assert (codes.limit, codes.per_word) == (limit, 16 // bits)
    torch.manual_seed(bits)
    for most in (1, limit - 1, limit, 2 * limit, 2**15 - 1):
        numbers = torch.randint(-most - 1, most + 1, (4 * GRANULE,), dtype=torch.int16)
        numbers[::7] = 0
        escaped = numbers.abs().ge(limit) | numbers.eq(-(2**15))
        assert torch.equal(codes.escapes(numbers), escaped)
        words = codes.pack(numbers)
        assert (words.numel(), words.dtype) == (4 * GRANULE * bits // 16, torch.int16)
        assert torch.equal(codes.unpack(words), numbers.masked_fill(escaped, -limit))
        holding = escaped.view(-1, codes.per_word).any(1)
        assert codes.escaped(words).tolist() == holding.nonzero().view(-1).tolist()


@pytest.mark.parametrize("with_numpy", [True, False])
def test_flags_come_back_each_from_its_bit(with_numpy: bool) -> None:
    torch.manual_seed(0)
    flags = torch.rand(8 * 64) < 0.5
    packed = pack_flags(flags)
    assert packed[0].item() == sum(2**at for at in range(8) if flags[at])
    assert torch.equal(unpack_flags(packed), flags)
    with mock.patch.object(packing, "numpy", packing.numpy if with_numpy else None):
        assert places(flags).tolist() == [at for at in range(len(flags)) if flags[at]]


#: By form: what is added to 1024 words, and the bytes that it then takes behind the table.
FORMS: list[tuple[int, list[int], int]] = [
    (0, [0], 0),
    (1, [1] + [0] * 255, 128 // 8 + 4 * 2),  # 128 words' bitmap, and four of them
    (2, [1, -1], 256),
    (4, [2, -2], 512),
    (4, [7, -7], 512),
    (8, [8, -8], 1024),
    (8, [127, -100, 90], 1024),
    (16, [500, -4000], 2048),
    (16, [1] * 8 + [500] * 120, 2048),  # which the sample does not show
]


@pytest.mark.parametrize(("form", "pattern", "size"), FORMS)
def test_a_chunk_takes_the_form_of_the_fewest_bytes(
    form: int, pattern: list[int], size: int
) -> None:
    base = torch.arange(1024, dtype=torch.int16)
    change = torch.tensor(pattern * 1024, dtype=torch.int16)[:1024]
    encoded = difference.encode(base + change, base)
    told, *counts = encoded[:16].view(torch.int32).tolist()
    assert told == form
    assert form not in (0, 16) or counts == [0, 0, 0]
    assert encoded.numel() == 16 + size


def test_what_a_code_cannot_hold_follows_as_bytes_and_then_as_words() -> None:
    base = torch.zeros(1024, dtype=torch.int16)
    new = base.clone()
    new[::2] = 1
    new[8 * 16 + 5 : 8 * 16 + 8] = torch.tensor([2, -128, 4000])  # in what is sampled
    new[9] = 128
    encoded = difference.encode(new, base)
    # Codes of two bits; four escaped, of which two are wide: words, bytes, and nothing to fill up.
    assert encoded[:16].view(torch.int32).tolist() == [2, 128, 4, 2]
    assert encoded.numel() == 16 + 256 + 2 * 2 + 4
    new[11] = -2
    assert difference.encode(new, base).numel() == 16 + 256 + 2 * 2 + 5 + 1
    assert difference.apply(encoded, base) == encoded.numel()


@pytest.mark.parametrize(("numel", "chunks"), [(0, 1), (1, 1), (2**17, 1), (2**17 + 1, 2)])
def test_the_most_that_a_difference_takes_is_a_table_and_the_words(numel: int, chunks: int) -> None:
    assert difference.capacity(numel) == 16 * chunks + 2 * numel


@pytest.mark.parametrize("field", range(4))
def test_a_table_that_says_otherwise_is_refused(field: int) -> None:
    torch.manual_seed(0)
    base = torch.zeros(1024, dtype=torch.int16)
    for change in (torch.eye(32), torch.randint(-2, 3, (32, 32)), 300 * torch.eye(32) + 1):
        encoded = difference.encode(change.to(torch.int16).view(-1), base)
        for other in (-1, 1):
            table = encoded.clone()
            row = table[:16].view(torch.int32)
            if field == 1 and row[0] != 1:  # the count of words is of sparse chunks alone
                continue
            row[field] += other if field else 32
            with pytest.raises(ValueError, match="damaged"):
                difference.apply(table, base.clone())
    with pytest.raises(ValueError, match="damaged"):
        difference.apply(encoded[:15], base)
