"""Slices: what was let go is given out anew, to its own stream and in its own form alone."""

from __future__ import annotations

import torch

from fcdp.cache.entry import Slice, Slices
from fcdp.streams import Streams
from tests.fcdp.stand_ins import CPU


def taken(slices: Slices, numel: int = 4, dtype: torch.dtype = torch.float32) -> Slice:
    return slices.take(2, numel, dtype, CPU, own=None)


def test_a_slice_is_given_out_anew_as_if_it_were_new() -> None:
    streams = Streams(CPU)
    slices = Slices(streams, streams.copies_in, kept=0)
    first = taken(slices)
    with first.access.reading(streams.inter_node):
        rows = first.rows(0, torch.zeros(4))
    before = first.access
    slices.release(first)
    again = taken(slices)
    assert again.memory.data_ptr() == rows[1].data_ptr()
    assert again.access is not before
    assert again.rows(0, torch.zeros(4, dtype=torch.int32))[1].dtype == torch.int32


def test_neither_what_is_in_use_nor_another_form_nor_borrowed_memory_is() -> None:
    streams = Streams(CPU)
    slices = Slices(streams, streams.copies_in, kept=0)
    first, second = taken(slices), taken(slices)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    slices.release(first)
    assert taken(slices, numel=8) is not first
    slices.release(second)
    assert taken(slices, dtype=torch.int32) is not second
    borrowed = Slice(torch.zeros(2, 4), None, streams.inter_node)
    borrowed.access._reads[streams.copies_out] = torch.cpu.Stream()  # a reader's event
    slices.release(borrowed)
    assert taken(slices) is not borrowed
