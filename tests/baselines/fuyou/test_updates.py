"""The order in which groups and blocks are read, stepped and written, on stores that note it."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from baselines.fuyou.fifo import Fifo
from baselines.fuyou.layout import Group, laid_out
from baselines.fuyou.memory import Dram
from baselines.fuyou.optimizer import BUFFERS, Updates
from baselines.fuyou.transfers import Copies
from baselines.settings import Update

CPU = torch.device("cpu")
GROUPS = 4
NO_GROUP = -1
Note = tuple[str, int]


class _Fakes:
    """A store and an Adam in one, which note what begins and ends."""

    steps_ended = 0

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self._noted = threading.Condition()
        #: Which group's state each buffer has, from its read to the end of its write.
        self._users: dict[int, int] = {}
        #: Called as a read, step or write of a group begins, which it may hold.
        self.hold: Callable[[str, int], object] = lambda what, index: None
        self.fails: Note | None = None

    def tell(self, what: str, index: int) -> None:
        with self._noted:
            self.notes.append((what, index))
            self._noted.notify_all()

    def note(self, what: str, group: Group) -> None:
        self.tell(what, group.index)
        self.hold(what, group.index)
        if self.fails == (what, group.index):
            raise FloatingPointError("here")

    def wait_for(self, *notes: Note) -> None:
        with self._noted:
            there = self._noted.wait_for(lambda: set(notes) <= set(self.notes), 60)
        assert there, f"{notes} are not in {self.notes}"

    def read(self, group: Group, buffer: torch.Tensor) -> None:
        assert buffer.data_ptr() not in self._users, "somebody has the buffer"
        self._users[buffer.data_ptr()] = group.index
        self.note("read", group)

    def write(self, group: Group, buffer: torch.Tensor) -> None:
        assert self._users[buffer.data_ptr()] == group.index
        try:
            self.note("write", group)
        finally:
            del self._users[buffer.data_ptr()]

    def end(self) -> None:
        self.tell("end", NO_GROUP)
        self.steps_ended += 1

    def commit(self, step: int) -> None:
        self.tell(f"record of {step}", NO_GROUP)

    def put_aside(self, group: Group, gradient: torch.Tensor) -> None:
        self.note("put aside", group)

    def take_aside(self, group: Group, memory: torch.Tensor) -> Future[int]:
        taken: Future[int] = Future()
        taken.set_result(0)
        return taken

    def step(self, group: Group, buffer: torch.Tensor, gradient: torch.Tensor, done: int) -> None:
        assert self._users[buffer.data_ptr()] == group.index
        self.note("step", group)
        self.note("stepped", group)


def _groups() -> list[Group]:
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(GROUPS)]
    layout = laid_out(nn.Sequential(*blocks), blocks, torch.float32, aside=True)
    return layout.backward_order()


@contextmanager
def _updates(
    form: Update, fakes: _Fakes, groups: list[Group], buffers: int | None = None
) -> Iterator[Updates]:
    """With ``buffers``, by default as many as the form has where there is room."""
    both = cast(Any, fakes)
    dram = Dram(2**20, CPU)
    renewed = lambda group, _: fakes.note("renewed", group)  # noqa: E731
    updates = Updates(form, both, both, groups, dram, renewed, sums=False)
    count = BUFFERS[form] if buffers is None else buffers
    assert updates.ring.deepen(count, 0) == count
    yield updates
    updates.close()


def _step(updates: Updates, groups: list[Group]) -> None:
    updates.begin()
    for group in groups:
        updates.submit(group, updates.memory(), [], last=True)
    updates.finish()
    updates.commit()


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("form", ["after", "overlapped", "delayed"])
def test_nothing_is_written_before_its_step_is_acknowledged(form: Update, buffers: int) -> None:
    """And a buffer has one group at a time, however many there are; in two steps."""
    fakes, groups = _Fakes(), _groups()
    with _updates(form, fakes, groups, buffers) as updates:
        for _ in range(2):
            fakes.notes.clear()
            _step(updates, groups)
            updates.flush()
            for group in groups:
                of_group = [what for what, index in fakes.notes if index == group.index]
                aside = ["put aside"] * (form == "after")
                assert [what for what in of_group if what != "read"] == [
                    *aside,
                    *("step", "stepped", "renewed", "write"),
                ]
                assert of_group.index("read") < of_group.index("step")
            if form == "after":
                assert [what for what, _ in fakes.notes[:GROUPS]] == ["put aside"] * GROUPS
            for what in ("read", "step", "write"):
                order = [index for noted, index in fakes.notes if noted == what]
                assert order == [group.index for group in groups]


def test_reads_and_writes_go_on_while_a_group_is_stepped() -> None:
    """``overlapped``: the read of the next one; ``delayed``: and the write of the one before."""
    forms: dict[Update, tuple[str, ...]] = {"overlapped": ("read",), "delayed": ("read", "write")}
    for form, besides in forms.items():
        fakes, groups = _Fakes(), _groups()
        first, second, third, _ = (group.index for group in groups)
        notes = {"read": ("read", third), "write": ("write", first)}
        waited = {("step", second): [notes[what] for what in besides]}
        fakes.hold = lambda *noted, f=fakes, w=waited: f.wait_for(*w.get(noted, ()))  # type: ignore[misc]
        with _updates(form, fakes, groups) as updates:
            _step(updates, groups)


def test_a_delayed_step_ends_before_it_is_written_and_counts_when_it_is() -> None:
    """The next one's groups are stepped while the last ones of this are written."""
    fakes, groups = _Fakes(), _groups()
    first, last = groups[0].index, groups[-1].index
    with _updates("delayed", fakes, groups) as updates:
        # The writer has the last group in hand until the next step has stepped its first.
        waited = {("write", last): [("second", first)]}
        fakes.hold = lambda *noted: fakes.wait_for(*waited.pop(noted, ()))
        _step(updates, groups)
        assert ("end", NO_GROUP) in fakes.notes
        assert ("record of 1", NO_GROUP) not in fakes.notes
        updates.begin()
        fakes.hold = lambda what, index: what != "step" or fakes.tell("second", index)
        updates.submit(groups[0], updates.memory(), [], last=True)
        updates.flush()
        assert fakes.notes.index(("write", last)) < fakes.notes.index(("record of 1", NO_GROUP))
        for group in groups[1:]:
            updates.submit(group, updates.memory(), [], last=True)
        updates.finish()
        updates.commit()
        updates.flush()
    assert fakes.notes[-1] == ("record of 2", NO_GROUP)
    second = fakes.notes.index(("record of 1", NO_GROUP))
    assert all(("write", group.index) in fakes.notes[second:] for group in groups)


@pytest.mark.parametrize("form", ["after", "overlapped", "delayed"])
@pytest.mark.parametrize("what", ["read", "step", "write"])
def test_what_fails_is_raised_and_the_group_after_it_is_not_written(
    form: Update, what: str
) -> None:
    fakes, groups = _Fakes(), _groups()
    fakes.fails = what, groups[1].index
    with _updates(form, fakes, groups, 1) as updates, pytest.raises(FloatingPointError):
        _step(updates, groups)
        updates.flush()
    written = [index for noted, index in fakes.notes if noted == "write"]
    before = 1 + (what == "write")
    assert written[:before] == [group.index for group in groups[:before]]
    # Who steps while a write goes on may write once more: none of it counts.
    assert len(written) == before or (form, what) == ("delayed", "write")


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=12), st.randoms())
def test_pieces_of_host_memory_are_apart_and_come_back(sizes: list[int], chance: Any) -> None:
    dram = Dram(2**17, CPU)
    taken: list[torch.Tensor] = []
    for number, size in enumerate(sizes):
        piece = dram.try_take(size)
        if piece is None:
            assert dram.free < 2**17
            dram.give_back(taken.pop(chance.randrange(len(taken))))
            continue
        taken.append(piece.fill_(number))
        assert len({int(t[0]) for t in taken}) == len(taken)
        assert all(bool((t == t[0]).all()) for t in taken)
    for piece in taken:
        dram.give_back(piece)
    assert dram.free == 2**17
    assert dram.take(2**17, "all of it").numel() == 2**17
    with pytest.raises(ValueError, match="dram = 131 kB: one more takes"):
        dram.take(1, "one more")


BLOCKS = 5
#: The order in which blocks are computed.
ORDER = [*range(BLOCKS), *reversed(range(BLOCKS))]


class _Store:
    """Fills what is read with the group's number."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def read_segment(self, group: Group, segment: object, memory: torch.Tensor) -> Future[int]:
        self.reads.append(group.index)
        memory.view(torch.float32).fill_(group.index)
        read: Future[int] = Future()
        read.set_result(0)
        return read


@pytest.mark.parametrize("slots", [2, 3, 9])
def test_the_last_blocks_of_forward_stay_for_backward(slots: int) -> None:
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks).requires_grad_(False)
    layout = laid_out(model, blocks, torch.float32, aside=False)
    store = _Store()
    fifo = Fifo(layout, cast(Any, store), Dram(2**20, CPU), Copies(CPU), slots)
    fifo.expect(ORDER)
    for block in ORDER:
        fifo.acquire(block)
        (group,) = layout.blocks[block].groups
        assert blocks[block].weight.unique().tolist() == [group.index]
        fifo.release(block)
    with pytest.raises(RuntimeError, match="the model computed block 0 out of turn"):
        fifo.acquire(0)
    fifo.close()
    assert len(store.reads) == BLOCKS + max(0, BLOCKS - slots)
