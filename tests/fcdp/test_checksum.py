"""Checksums see what changed, where it changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcdp.checksum import checksum, sum_of_words

SUMS = pytest.mark.parametrize("summed", [checksum, sum_of_words])
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


@SUMS
def test_words_in_another_order_are_other_bytes(summed: Sum) -> None:
    words = torch.arange(4.0, dtype=torch.float64)
    assert summed(words) != summed(words.flip(0))


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "signs": lambda t: t.neg_(),
    "halves": lambda t: t.mul_(0.5),
    "doubles": lambda t: t.mul_(2),
    "swap halves": lambda t: t.copy_(t.roll(t.numel() // 2)),
    "one in two": lambda t: t[::2].neg_(),
}


@SUMS
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=60)
@given(count=st.one_of(st.integers(2, 200), st.integers(2**9, 2**18)), equal=st.booleans())
def test_what_changes_all_elements_alike_is_seen(
    summed: Sum, change: str, dtype: torch.dtype, count: int, equal: bool
) -> None:
    """Such writes change the highest bits of an even number of words, which plain sums lose."""
    shard = torch.ones(count, dtype=dtype) if equal else torch.randn(count).to(dtype)
    changed = shard.clone()
    CHANGES[change](changed)
    assert torch.equal(changed, shard) == bool(summed(changed) == summed(shard))


def test_nothing_and_a_view_with_gaps_have_checksums() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert checksum(table[:, 1]) == checksum(table[:, 1].contiguous())
    assert checksum(torch.empty(0)) == checksum(torch.empty(0))
