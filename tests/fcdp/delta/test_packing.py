"""Codes and flags come back from their words; each form of a chunk is taken where it is least."""

from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.delta import difference, packing
from fcdp.delta.packing import GRANULE, Codes, pack_flags, places, unpack_flags

#: Two runs of what stays in a core's cache, and a part of a third.
COUNT = 2 * packing._NEAR + 4 * GRANULE
BITS: Any = pytest.mark.parametrize("bits", [2, 4, 8])


@BITS
def test_every_number_comes_back_from_every_place_or_is_escaped(bits: Any) -> None:
    codes = Codes(bits)
    limit = 2 ** (bits - 1)
    assert codes.limit == limit
    torch.manual_seed(bits)
    for most in (1, limit - 1, limit, 2 * limit, 2**15 - 1):
        numbers = torch.randint(-most - 1, most + 1, (COUNT,), dtype=torch.int16)
        numbers[::7] = numbers[-5:] = 0
        escaped = numbers.abs().ge(limit) | numbers.eq(-(2**15))
        assert torch.equal(codes.escapes(numbers), escaped)
        words = codes.pack(numbers)
        assert (words.numel(), words.dtype) == (COUNT * bits // 16, torch.int16)
        assert torch.equal(codes.unpack(words), numbers.masked_fill(escaped, -limit))
        base = torch.randint(-(2**15), 2**15, (COUNT,)).to(torch.int16)
        near, wide = torch.empty_like(base, dtype=torch.int8), torch.empty_like(base)
        on_host = torch.zeros_like(words).view(torch.uint8)
        arrays = (bits, *(each.numpy() for each in (on_host, near, wide)))
        some, far = packing.pack((base + numbers).numpy(), base.numpy(), *arrays)
        assert torch.equal(on_host, words.view(torch.uint8))
        left = numbers[escaped]
        far_off = left.to(torch.int8) != left
        expected = left.masked_fill(far_off, 0).to(torch.int8), left[far_off]
        near, wide = near[:some], wide[:far]
        assert all(map(torch.equal, (near, wide), expected))
        for count in (COUNT, COUNT - 5):  # codes fill a granule up with zeros
            for leftover, whole in (
                (expected, True),
                ((near, wide[1:]) if far else (near[1:], wide), not some),
                ((_one_more(near), wide), False),
                ((near, _one_more(wide)), False),
            ):
                arrays, out = [each.numpy() for each in leftover], base[:count].clone()
                assert packing.add(on_host.numpy(), bits, *arrays, out.numpy()) == whole
                assert not whole or torch.equal(out, (base + numbers)[:count])
        for at in (COUNT - 5, COUNT - 1):  # an escape behind the last word
            behind = on_host.clone()
            behind[at * bits // 8] += limit << at * bits % 8
            arrays = [each.numpy() for each in (_one_more(near), wide)]
            assert not packing.add(behind.numpy(), bits, *arrays, base[:-5].clone().numpy())


def _one_more(numbers: torch.Tensor) -> torch.Tensor:
    return torch.cat([numbers, numbers.new_ones(1)])


@pytest.mark.parametrize("step", [1, 3])
def test_a_sample_counts_groups_and_how_far_their_words_differ(step: int) -> None:
    base = torch.randint(-(2**15), 2**15, (36, 4, 8)).to(torch.int16)
    base[0, 0, 0] = 2**15 - 1  # numbers wrap
    change = torch.zeros_like(base)
    by = torch.tensor([1, -1, 2, -2, 7, -7, 8, -8, 127, -127, 128, -128]).short()
    at = torch.arange(12)
    change[at * step, at % 4, at % 8] = by
    counted = packing.sample((base + change).view(-1).numpy(), base.view(-1).numpy(), step)
    assert counted == (4 * 36 // step, 12, 10, 6, 2)


def test_words_that_changed_come_back_to_their_places() -> None:
    words = torch.randint(-2, 3, (64,)).to(torch.int16)
    changed, flags = torch.empty_like(words), torch.empty(8, dtype=torch.uint8)
    bitmap = flags.numpy()
    changed = changed[: packing.keep_changed(words.numpy(), bitmap, changed.numpy())]
    assert torch.equal(flags, pack_flags(words != 0))
    assert changed.tolist() == [word for word in words.tolist() if word]
    out = torch.zeros_like(words)
    assert packing.spread_changed(bitmap, changed.numpy(), out.numpy())
    assert torch.equal(out, words)
    for other in (changed[1:], torch.cat([changed, changed])):
        assert not packing.spread_changed(bitmap, other.numpy(), torch.zeros(64).short().numpy())


def test_flags_come_back_each_from_its_bit() -> None:
    torch.manual_seed(0)
    flags = torch.rand(8 * 64) < 0.5
    packed = pack_flags(flags)
    assert packed[0].item() == sum(2**at for at in range(8) if flags[at])
    assert torch.equal(unpack_flags(packed), flags)
    assert places(flags).tolist() == [at for at in range(len(flags)) if flags[at]]


#: By form: what is added to 1024 words, and the bytes that it then takes behind the table.
FORMS: list[tuple[int, list[int], int]] = [
    (0, [0], 0),
    (1, [1] + [0] * 255, 128 // 8 + 4 * 2),  # 128 words' bitmap, and four of them
    (1, [0] * 8 + [1] * 120, 128 // 8 + 120 * 2),  # of which the sample shows nothing
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
    actual, *counts = encoded[:16].view(torch.int32).tolist()
    assert actual == form
    assert form not in (0, 16) or counts == [0, 0, 0]
    assert encoded.numel() == 16 + size


@pytest.mark.parametrize(("numel", "chunks"), [(0, 1), (1, 1), (2**19, 1), (2**19 + 1, 2)])
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


def test_no_other_form_takes_fewer_bytes_where_the_sample_is_true() -> None:
    torch.manual_seed(0)
    for _ in range(100):
        # How many groups of eight change, how many numbers of them, and how far.
        some, dense, mixed = torch.rand(3)
        most = torch.tensor([1, 7, 127, 3000])[torch.randint(0, 4, (64, 8))]
        least = torch.tensor([1, 2, 8, 128])[torch.randint(0, 4, ())]
        groups = torch.where(torch.rand(64, 8) < mixed, most, least)
        groups *= (torch.rand(64, 8) < dense) & (torch.rand(64, 1) < some)
        new = groups.to(torch.int16).repeat_interleave(16, 0).view(-1)
        base = torch.zeros_like(new)
        sizes = []
        for form in (1, 2, 4, 8, 16):
            with mock.patch.object(difference, "_choose", return_value=form):
                sizes.append(difference.encode(new, base).numel())
        assert difference.encode(new, base).numel() <= min(sizes) + 1 or not groups.any()


def test_a_sample_looks_at_other_columns_of_a_matrix_each_time() -> None:
    base = torch.zeros(2**13, 64, dtype=torch.int16)
    new = base.clone()
    new[:, 32:] = 3
    assert difference._choose(new.view(-1), base.view(-1)) == 4


def test_what_is_taken_lies_inside_of_what_arrived() -> None:
    reader = difference._Reader(torch.arange(6, dtype=torch.uint8), 2)
    assert reader.take(2, torch.int16).view(torch.uint8).tolist() == [2, 3, 4, 5]
    assert reader.take(0, torch.int16).numel() == 0
    for count in (1, -1):
        with pytest.raises(ValueError, match="damaged"):
            difference._Reader(torch.zeros(4, dtype=torch.uint8), 4).take(count, torch.uint8)
