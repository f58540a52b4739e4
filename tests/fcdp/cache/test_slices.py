"""Slices: a released one is reused on its own stream and in its own form alone."""

from typing import Any

import pytest
import torch

from fcdp.streams import Access, Slice, Slices, Streams
from tests.fcdp.stand_ins import CPU


def taken(slices: Slices, numel: int = 4, dtype: torch.dtype = torch.float32) -> Slice:
    return slices.take(2, numel, dtype, own_row=None)


def test_a_slice_is_given_out_anew_as_if_it_were_new() -> None:
    streams = Streams(CPU)
    slices = Slices(streams, streams.copies_in, retain=0)
    first = taken(slices)
    rows = first.rows(0, torch.zeros(4))
    first.access.note_read(streams.inter_node)
    before = first.access
    slices.release(first)
    again = taken(slices)
    assert again.memory.data_ptr() == rows[1].data_ptr()
    assert again.access is not before
    assert again.rows(0, torch.zeros(4, dtype=torch.int32))[1].dtype == torch.int32


def test_neither_what_is_in_use_nor_another_form_nor_borrowed_memory_is() -> None:
    streams = Streams(CPU)
    slices = Slices(streams, streams.copies_in, retain=0)
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


class Noting:
    """A stream whose events are named by order, and that notes what it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.recorded, self.waited = name, 0, set[str]()

    def record_event(self) -> str:
        self.recorded += 1
        return f"{self.name}{self.recorded}"

    def wait_event(self, event: str) -> None:
        self.waited.add(event)


def enter(access: Access, kind: str, stream: Any) -> None:
    if kind == "read":
        access.written_for(stream)
        access.note_read(stream)
    else:
        access.freed_for(stream)
    if kind == "write":
        access.note_write(stream)


@pytest.mark.parametrize(
    ("before", "kind", "waited"),
    [
        ("", "read", ""),
        ("", "write", ""),
        ("write a", "read", "a1"),
        ("write a", "write", "a1"),
        ("write a", "free", "a1"),
        ("write a, read b", "read", "a1"),
        ("write a, read b, read c", "write", "a1 b1 c1"),
        ("write a, read b, read c", "free", "a1 b1 c1"),
        ("read b, read b", "write", "b2"),
        ("read b, write a", "write", "a1"),  # which has waited for the reader
    ],
)
def test_readers_wait_for_the_last_write_and_writers_for_readers_too(
    before: str, kind: str, waited: str
) -> None:
    access, streams = Access(), {name: Noting(name) for name in "abc"}
    for step in filter(None, before.split(", ")):
        earlier, name = step.split()
        enter(access, earlier, streams[name])
    stream = Noting("last")
    enter(access, kind, stream)
    assert stream.waited == {*waited.split()}


def test_a_copy_waits_for_what_it_reads_and_fills_and_one_event_ends_it() -> None:
    source, target, stream = Access(), Access(), Noting("copy")
    enter(source, "write", Noting("a"))
    enter(source, "read", Noting("b"))
    enter(target, "write", Noting("c"))
    enter(target, "read", Noting("d"))
    filled, values = torch.zeros(2), torch.ones(2)
    streams = Streams(CPU)
    streams.copy([filled], [values], stream, reads=source, writes=target)
    assert filled.tolist() == [1.0, 1.0]
    assert stream.waited == {"a1", "c1", "d1"}
    assert (stream.recorded, target.events(), source.events()) == (
        1,
        ["copy1"],
        ["a1", "b1", "copy1"],
    )
