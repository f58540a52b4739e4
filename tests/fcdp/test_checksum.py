"""Checksums see what changed, where it changed."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcdp.checksum import checksum, quick_checksum, sum_of_words


def on_an_accelerator(values: torch.Tensor) -> torch.Tensor:
    return sum_of_words(values.contiguous().view(-1))


SUMS = pytest.mark.parametrize("summed", [checksum, quick_checksum, on_an_accelerator])
Sum = Callable[[torch.Tensor], torch.Tensor]


@SUMS
@given(content=st.binary(min_size=1, max_size=64), data=st.data())
def test_a_changed_byte_changes_the_checksum(
    summed: Sum, content: bytes, data: st.DataObject
) -> None:
    shard = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    place = data.draw(st.integers(0, len(content) - 1))
    changed = shard.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert summed(changed) != summed(shard)
    assert summed(shard.clone()) == summed(shard)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "signs": lambda t: t.neg_(),
    "halves": lambda t: t.mul_(0.5),
    "doubles": lambda t: t.mul_(2),
    "swap halves": lambda t: t.copy_(t.roll(t.numel() // 2)),
    "one in two": lambda t: t[::2].neg_(),
    "the other one in two": lambda t: t[1::2].neg_(),
    "the first of four": lambda t: t[::4].neg_(),
    "the last of four": lambda t: t[3::4].neg_(),
    "swap two that are near": lambda t: t[:3:2].copy_(t[:3:2].flip(0)),
    "swap two that are far": lambda t: t[:: len(t) - 1].copy_(t[:: len(t) - 1].flip(0)),
}


@SUMS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=20)
@given(
    count=st.one_of(st.integers(2, 200), st.integers(2**9, 2**18)),
    equal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_what_changes_elements_alike_or_moves_them_is_seen(
    summed: Sum, change: str, dtype: torch.dtype, count: int, equal: bool, seed: int
) -> None:
    """Signs change the highest bits of an even number of words, which plain sums lose."""
    generator = torch.Generator().manual_seed(seed)
    shard = torch.randn(count, generator=generator).to(dtype)
    if equal:
        shard.fill_(1)
    changed = shard.clone()
    CHANGES[change](changed)
    assert torch.equal(changed, shard) == bool(summed(changed) == summed(shard))


@SUMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_changes_in_some_blocks_alone_or_between_them_is_seen(
    summed: Sum, dtype: torch.dtype
) -> None:
    table = torch.randn(5, 2**19 + 3).to(dtype)
    others = {
        "two rows swapped": table[[0, 3, 2, 1, 4]],
        "neighbours swapped": table[[0, 1, 2, 4, 3]],
        "signs of a row": table * torch.tensor([[1], [1], [-1], [1], [1]], dtype=dtype),
        "signs of one row in two": table * torch.tensor([[1], [-1], [1], [-1], [1]], dtype=dtype),
        "one element, one step": table.clone(),
    }
    bits = others["one element, one step"].view(torch.uint8)
    bits[-1, -table.itemsize] ^= 1
    before = summed(table)
    assert [name for name, other in others.items() if summed(other) == before] == []


@SUMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_where_the_bytes_lie_does_not_count(summed: Sum, dtype: torch.dtype) -> None:
    """Bytes are anywhere in a buffer, with gaps between them, or nowhere."""
    buffer = torch.arange(16).to(dtype)
    inside = [buffer[first : first + 5] for first in range(4)]
    for part in (*inside, buffer.view(4, 4)[:, 1], buffer[:0], buffer[1:1]):
        assert summed(part) == summed(part.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [2**17, 2**17 + 8 * 77])
def test_a_quick_sum_sees_each_word_and_their_places(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = quick_checksum(values)
    assert quick_checksum(values.clone()) == before
    assert quick_checksum(values, torch.zeros((), dtype=torch.int64)) == before
    words = values.view(torch.int64)
    for place in (0, 1, 508, 509, len(words) // 2, len(words) - 1):
        for change in (1, 2**63 - 1, -(2**63)):  # of a sign alone, too
            changed = values.clone()
            changed.view(torch.int64)[place] += change
            assert quick_checksum(changed) != before, (place, change)
    for permuted in (words.flip(0), words.roll(1), words.roll(509), words.roll(3 * 509)):
        assert quick_checksum(permuted) != before
    assert quick_checksum(-values) != before


def test_a_small_tensor_and_one_of_half_words_have_the_exact_sum() -> None:
    small, odd = torch.randn(100), torch.randn(2**17 + 1)
    table = torch.randn(512, 512)
    for values in (small, odd, odd[1:], table.t()):
        assert quick_checksum(values) == checksum(values)
