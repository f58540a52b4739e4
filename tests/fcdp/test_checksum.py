"""Checksums see what changed, where it changed."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fcdp.checksum import checksum


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_changed_byte_and_an_exchange_change_the_checksum(
    content: bytes, data: st.DataObject
) -> None:
    shard = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    place = data.draw(st.integers(0, len(content) - 1))
    changed = shard.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    assert checksum(changed) != checksum(shard)
    assert checksum(shard.clone()) == checksum(shard)


def test_words_in_another_order_are_other_bytes() -> None:
    words = torch.arange(4.0, dtype=torch.float64)
    assert checksum(words) != checksum(words.flip(0))
