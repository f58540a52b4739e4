"""When groups are read, stepped, acknowledged and written, on a store and an Adam that note it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from baselines.fuyou.layout import Group, laid_out
from baselines.fuyou.memory import Dram
from baselines.fuyou.optimizer import Updates
from baselines.settings import Update

GROUPS = 4
Note = tuple[str, int]


class _Fakes:
    """A store and an Adam in one, which note what begins and ends."""

    step = 0

    def __init__(self) -> None:
        self.notes: list[Note] = []
        #: Held by a step of a group until it may end.
        self.hold: Callable[[int], None] = lambda _: None
        self.fails: int | None = None

    def read(self, group: Group, names: object, buffer: torch.Tensor) -> list[Future[int]]:
        self.notes.append(("read", group.index))
        return []

    def write(self, group: Group, buffer: torch.Tensor) -> None:
        self.notes.append(("write", group.index))

    def put_aside(self, group: Group, gradient: torch.Tensor) -> None:
        self.notes.append(("put aside", group.index))

    def take_aside(self, group: Group, memory: torch.Tensor) -> bool:
        return True


class _Adam:
    def __init__(self, fakes: _Fakes) -> None:
        self._fakes = fakes

    def step(self, group: Group, buffer: torch.Tensor, gradient: torch.Tensor, done: int) -> None:
        self._fakes.notes.append(("step", group.index))
        self._fakes.hold(group.index)
        if self._fakes.fails == group.index:
            raise FloatingPointError("here")
        self._fakes.notes.append(("stepped", group.index))


def _groups() -> list[Group]:
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(GROUPS)]
    layout = laid_out(nn.Sequential(*blocks), blocks, torch.float32, aside=True)
    return layout.backward_order()


def _updates(form: Update, fakes: _Fakes, groups: list[Group]) -> Updates:
    renewed = lambda group, _: fakes.notes.append(("renewed", group.index))  # noqa: E731
    store, adam = cast(Any, fakes), cast(Any, _Adam(fakes))
    dram = Dram(2**20, torch.device("cpu"))
    return Updates(form, store, adam, groups, dram, renewed, sums=False)


def _submit(updates: Updates, groups: list[Group]) -> None:
    for group in groups:
        updates.submit(group, updates.memory(), [], last=True)


@pytest.mark.parametrize("form", ["after", "overlapped", "delayed"])
def test_nothing_is_written_before_its_step_is_acknowledged(form: Update) -> None:
    fakes, groups = _Fakes(), _groups()
    updates = _updates(form, fakes, groups)
    _submit(updates, groups)
    updates.finish()
    updates.close()
    for group in groups:
        own = [what for what, index in fakes.notes if index == group.index]
        assert own[-5:] == ["read", "step", "stepped", "renewed", "write"]
    if form == "after":
        assert [what for what, _ in fakes.notes[:GROUPS]] == ["put aside"] * GROUPS
    order = [index for what, index in fakes.notes if what == "write"]
    assert order == [group.index for group in groups]


def test_the_write_of_a_group_goes_on_while_the_next_is_stepped() -> None:
    fakes, groups = _Fakes(), _groups()
    wrote = threading.Event()
    second = groups[1].index

    def hold(index: int) -> None:
        if index == second:
            assert wrote.wait(60), "the first group was not written while the second was stepped"

    fakes.hold = hold
    note = fakes.write
    fakes.write = lambda group, buffer: (note(group, buffer), wrote.set())[0]  # type: ignore[method-assign, func-returns-value]
    updates = _updates("delayed", fakes, groups)
    _submit(updates, groups)
    updates.finish()
    updates.close()


def test_a_step_that_fails_is_raised_and_nothing_after_it_is_written() -> None:
    fakes, groups = _Fakes(), _groups()
    fakes.fails = groups[1].index
    updates = _updates("overlapped", fakes, groups)
    _submit(updates, groups)
    with pytest.raises(FloatingPointError, match="here"):
        updates.finish()
    updates.close()
    assert [index for what, index in fakes.notes if what == "write"] == [groups[0].index]


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=12), st.randoms())
def test_pieces_of_host_memory_are_apart_and_come_back(sizes: list[int], chance: Any) -> None:
    dram = Dram(2**17, torch.device("cpu"))
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
