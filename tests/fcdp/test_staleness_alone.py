"""What one rank takes for a write, and when it asks the others: without processes, unit by unit."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from fcdp.cache.entry import Entry
from fcdp.guard import Guard
from fcdp.staleness import Staleness, contents
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit


class Watched(StandInUnit):
    """A unit of two parameters, each its own shard."""

    def stamp(self) -> int:
        return sum(param._version for param in self.params)


def parameter() -> nn.Parameter:
    param: Any = nn.Parameter(torch.ones(2))
    param._local_tensor = param.detach()
    return param  # type: ignore[no-any-return]


class Rank:
    """A rank that agrees with itself; ``asked`` has the flags of each agreement."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        detect: bool = True,
        device_type: str = "cpu",
        nodes: int = 2,
        verify: bool = False,
        lacking: tuple[str, ...] | None = None,
        without_gradients: bool = False,
        units: str = "ab",
        wishes: list[bool] | None = None,
    ) -> None:
        self.asked: list[list[bool]] = []
        monkeypatch.setattr("fcdp.staleness.any_rank", self._any_rank)
        self.units: list[Any] = [
            Watched(name, 8, params=(parameter(), parameter())) for name in units
        ]
        self.entries = [Entry(unit) for unit in self.units]
        self.guard = Guard(self.units, CPU, STREAMS) if detect else None
        topology: Any = SimpleNamespace(
            **vars(Place(nodes, 0)), mesh=SimpleNamespace(device_type=device_type)
        )
        lacks = None if lacking is None else lambda unit: unit.name in lacking
        self._begins = True
        self.wished: list[bool] = []
        self.staleness = Staleness(
            self.entries,
            topology,
            self.guard,
            lambda unit: self._begins,
            lambda: without_gradients,
            verify=verify,
            lacks_base=lacks,
            wish=None if wishes is None else lambda: wishes.pop(0),
            agreed=self.wished.append,
        )

    def _any_rank(self, flags: list[bool], topology: Any) -> list[bool]:
        self.asked.append([*flags])
        return [*flags]

    def gather(self, *, begins: bool = True) -> str:
        """Begin a gather; return the units that became stale by it."""
        before = [entry.generation for entry in self.entries]
        self._begins = begins
        self.staleness.settle(self.units[0])
        return "".join(
            unit.name
            for unit, entry, was in zip(self.units, self.entries, before, strict=True)
            if entry.generation > was
        )

    def update(self, *params: nn.Parameter) -> torch.optim.Optimizer:
        """An optimizer that has told of its step, and left no trace of it."""
        optimizer = torch.optim.SGD(params, lr=1.0)
        self.staleness.begin_step(optimizer)
        self.staleness.end_step(optimizer)
        return optimizer


def test_all_is_stale_at_first_and_then_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for detect in (True, False):
        rank = Rank(monkeypatch, detect=detect)
        assert rank.gather(begins=False) == "ab"  # nobody has agreed yet
        assert rank.gather() == ""
        with torch.no_grad():
            rank.units[1].params[1].add_(1)
        assert rank.gather() == "b"
        assert rank.gather() == ""


@pytest.mark.parametrize("lacking", [None, ("b",)])
def test_a_wish_reaches_all_and_no_unit(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[str, ...] | None
) -> None:
    rank = Rank(monkeypatch, wishes=[False, True, False], lacking=lacking)
    assert [rank.gather(), rank.gather(), rank.gather()] == ["ab", "", ""]
    assert rank.wished == [False, True, False]
    assert [entry.based for entry in rank.entries] == [lacking is not None, False]
    plain = Rank(monkeypatch)
    plain.gather()
    assert plain.wished == [False]


def test_ranks_agree_where_a_pass_begins_or_where_they_were_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    for begins, agreements in ((True, 1), (False, 1), (False, 1), (True, 2)):
        rank.gather(begins=begins)
        assert len(rank.asked) == agreements
    rank.staleness.ask()
    rank.gather(begins=False)
    rank.gather(begins=False)
    assert len(rank.asked) == 3
    assert rank.asked[-1] == [False] * 4


def test_where_nothing_is_written_ranks_agree_before_the_first_pass_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)

    def agreements(*, begin: bool = True) -> int:
        before = len(rank.asked)
        for _ in range(2):
            if begin:
                rank.staleness.begin()
            rank.gather(begins=False)
        return len(rank.asked) - before

    assert agreements() == 2
    with rank.staleness.unchanged():
        assert agreements() == 1
        rank.staleness.ask()
        assert agreements() == 1
    assert agreements(begin=False) == 1
    assert agreements() == 2


@pytest.mark.parametrize(("nodes", "verify"), [(1, False), (1, True), (2, False)])
def test_one_node_keeps_nothing_and_agrees_only_to_verify(
    nodes: int, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, nodes=nodes, verify=verify)
    monkeypatch.setattr("fcdp.staleness.on_every_rank", lambda mine, topology: mine[None])
    assert rank.gather() == ("" if nodes == 1 and not verify else "ab")
    with torch.no_grad():
        rank.units[0].params[0].add_(1)
    if nodes == 1 and not verify:
        assert rank.gather(begins=False) == ""
    rank.staleness.conclude()
    assert len(rank.asked) == (0 if nodes == 1 and not verify else 1) + (nodes > 1)


@pytest.mark.parametrize("detect", [True, False])
def test_an_optimizer_writes_what_has_a_gradient_or_may_have_one(
    detect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, detect=detect, units="abc")
    rank.gather()
    (a, _), (b, _), (c, _) = (unit.params for unit in rank.units)
    b.requires_grad_(False)  # frozen after backward
    b.grad = torch.ones(2)
    c.requires_grad_(False)
    rank.update(a, b, c)
    assert rank.gather(begins=False) == "ab"
    rank.update(c)
    rank.update(parameter())
    assert len(rank.asked) == 2
    assert rank.gather(begins=False) == ""
    assert len(rank.asked) == 2  # nothing to agree on


def test_what_is_stepped_is_stale_whenever_its_closure_gathers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.gather()
    optimizer = torch.optim.SGD([rank.units[1].params[0]], lr=1.0)
    rank.staleness.begin_step(optimizer)
    assert [rank.gather(), rank.gather()] == ["b", "b"]
    rank.staleness.end_step(optimizer)
    assert [rank.gather(begins=False), rank.gather()] == ["b", ""]


def test_a_write_in_mid_pass_is_an_error_unless_it_is_declared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    rank.gather()
    with torch.no_grad():
        rank.units[0].params[0].add_(1)
    with pytest.raises(RuntimeError, match="a: parameters were written in place"):
        rank.gather(begins=False)
    rank.staleness.invalidate()
    assert rank.gather(begins=False) == "ab"
    assert rank.gather(begins=False) == ""


@pytest.mark.parametrize(
    ("detect", "device_type", "seen"),
    [(True, "cpu", "b"), (False, "cpu", ""), (True, "cuda", ""), (False, "cuda", "")],
)
def test_contents_are_compared_on_the_cpu_alone(
    detect: bool, device_type: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, detect=detect, device_type=device_type)
    rank.gather()
    rank.units[1].params[0].data.add_(1)
    assert rank.gather() == seen


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_is_compared_already_the_guard_does_not_check_again(
    device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, device_type=device_type, without_gradients=True)
    checked: list[str] = []
    nothing = [False] * len(rank.units)
    monkeypatch.setattr(rank.guard, "check", lambda: checked.append("") or (nothing, nothing))
    rank.gather()
    assert len(checked) == (device_type != "cpu")


def test_and_elsewhere_while_somebody_holds_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, detect=False)
    rank.gather()
    state = [unit.params[0].detach() for unit in rank.units]
    rank.staleness.hand_out(state)
    assert rank.gather() == ""
    rank.units[1].params[0].data.add_(1)
    rank.staleness.hand_out(state)  # which does not hide the write
    assert rank.gather() == "b"
    rank.units[0].params[0].data.add_(1)
    assert rank.gather() == "a"
    del state
    rank.gather()
    rank.units[0].params[0].data.add_(1)
    assert rank.gather() == ""


def test_what_has_no_memory_has_no_contents() -> None:
    meta = SimpleNamespace(_local_tensor=torch.empty(2, device="meta"))
    units: list[Any] = [Watched("", 8, params=params) for params in ((meta,), (meta, parameter()))]
    assert [len(contents(unit)) for unit in units] == [0, 1]


@pytest.mark.parametrize(
    ("wrong", "named"), [("e", "e:"), ("bcd", "b, c, d:"), ("abde", "a, b, d and 1 more units:")]
)
def test_stale_parameters_that_were_used_are_an_error_once(
    wrong: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(monkeypatch, units="abcde")
    rank.gather()
    assert rank.guard is not None
    for name in wrong:
        rank.guard.compare(rank.units["abcde".index(name)], torch.ones(1))
    with pytest.raises(RuntimeError, match=f"^{re.escape(named)} parameters were written"):
        rank.staleness.conclude()
    assert rank.gather(begins=False) == "abcde"
    assert rank.gather() == ""


def test_the_end_of_a_run_waits_for_what_the_guard_has_not_said_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    landed: list[bool] = []
    assert rank.guard is not None
    monkeypatch.setattr(rank.guard, "land", lambda: landed.append(not rank.asked))
    rank.staleness.conclude()
    assert landed == [True]
    unguarded = Rank(monkeypatch, detect=False)
    unguarded.staleness.conclude()
    assert unguarded.asked == []


def test_who_cannot_tell_a_difference_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, lacking=("a",))
    rank.gather()
    assert [entry.based for entry in rank.entries] == [False, True]
    assert rank.gather() == ""
    assert rank.asked[-1] == [False, False, False, False, True, False]
    assert [entry.based for entry in rank.entries] == [False, True]


def test_generations_of_other_ranks_are_compared_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, verify=True)
    ahead = torch.tensor([[0, 0], [0, 1], [0, 1]])
    monkeypatch.setattr("fcdp.staleness.on_every_rank", lambda mine, topology: mine + ahead)
    with pytest.raises(RuntimeError, match="b: rank 1 is at generation 3, rank 0 at 2"):
        rank.gather()
    monkeypatch.setattr("fcdp.staleness.on_every_rank", lambda mine, _: mine.expand(3, 2))
    assert rank.gather() == ""
