"""Decisions of the pass controller on one rank: what a gather is, and where a pass begins."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn

from fcdp.cache.cache import Entry
from fcdp.pass_controller import Decision, PassController
from fcdp.staleness import Votes
from tests.fcdp.stand_ins import Place, StandInUnit

NAMES = "ab"


class Controlled:
    """A controller among stand-ins, and the calls that it made, in order."""

    def __init__(
        self, nodes: int = 2, rank: int = 0, gathers: Any = None, model: nn.Module | None = None
    ) -> None:
        self.calls = calls = mock.Mock()
        topology: Any = Place(nodes, rank)
        self.units: list[Any] = [StandInUnit(name, 8, topology=topology) for name in NAMES]
        for unit in self.units:
            unit.module, unit.group = mock.Mock(name=unit.name), unit.name
        self.entries = [Entry(unit) for unit in self.units]
        self.cache = calls.cache
        self.cache.has_offered.return_value = True
        self.cache.stays.return_value = True
        self.staleness = calls.staleness
        self.staleness.asked = False
        self.staleness.watched = {unit: SimpleNamespace(params=[], stamp=0) for unit in self.units}
        self.staleness.votes.return_value = Votes([False] * len(NAMES), [False] * len(NAMES))
        topology.failures = calls.failures
        calls.failures.begins.return_value = False
        self.model = nn.Linear(1, 1) if model is None else model
        self.controller = PassController(
            self.model,
            self.entries,
            topology,
            cache=self.cache,
            staleness=self.staleness,
            guard=calls.guard,
            in_flight=calls.in_flight,
            gathers=gathers,
            reductions=None,
            look_ahead=1,
            verify=False,
            not_resharded=self.units[:1],
        )
        calls.reset_mock()
        self.staleness.asked = False

    def gather(self, place: int = 0, *, resized: bool = False, forward: bool = False) -> Decision:
        phase: Any = "forward" if forward else "backward"
        return self.controller.before_gather(self.entries[place], phase, resized=resized)

    def names(self) -> list[str]:
        return [str(call[0]) for call in self.calls.mock_calls]


def param(gradient: list[float] | None) -> Any:
    """A stand-in for a sharded parameter with such a local gradient."""
    local = gradient and SimpleNamespace(_local_tensor=torch.tensor(gradient))
    return SimpleNamespace(grad=local)


@pytest.fixture(autouse=True)
def fsdp2() -> Iterator[mock.Mock]:
    with mock.patch("fcdp.pass_controller.fsdp2") as module:
        module.outermost.return_value = None
        module.prefetched.return_value = None
        yield module


@pytest.fixture(autouse=True)
def asked() -> Iterator[list[list[bool]]]:
    """Flags of each exchange, in which the other ranks set none."""
    flags: list[list[bool]] = []

    def any_rank(mine: list[bool], topology: Any) -> list[bool]:
        flags.append([*mine])
        return [*mine]

    with mock.patch("fcdp.pass_controller.any_rank", any_rank):
        yield flags


@pytest.mark.parametrize(
    ("placed", "offered", "held", "hit"),
    [
        (True, 1, True, True),
        (False, 1, True, False),
        (True, 0, True, False),
        (True, 1, False, False),
    ],
)
def test_a_hit_is_fresh_placed_and_held(placed: bool, offered: int, held: bool, hit: bool) -> None:
    of = Controlled()
    of.entries[0].placed, of.entries[0].offered = placed, offered
    of.cache.has_offered.return_value = held
    decision = of.gather()
    assert (decision.hit, decision.difference, decision.keep) == (hit, False, not hit)


@pytest.mark.parametrize("held", [True, False])
def test_where_a_rank_may_lack_the_entry_all_are_asked_until_it_stays(
    held: bool, asked: list[list[bool]]
) -> None:
    of = Controlled()
    entry = of.entries[0]
    entry.fallible, entry.offered = True, 1
    of.cache.has_offered.return_value = held
    assert [of.gather().hit, of.gather().hit] == [held, held]
    assert asked == ([[False]] if held else [[True], [True]])
    assert entry.settled == held
    assert of.cache.stays.call_count == held, "what stays is not asked for again"
    of.cache.stays.return_value = False
    entry.settled = False
    of.gather()
    assert not entry.settled


@pytest.mark.parametrize(("fallible", "offered"), [(False, 1), (True, 0)])
def test_only_a_hit_that_may_fail_settles(fallible: bool, offered: int) -> None:
    gathers = mock.Mock()
    of = Controlled(gathers=gathers)
    entry = of.entries[0]
    entry.fallible, entry.offered, entry.based = fallible, offered, True
    assert of.gather().hit == (not fallible)
    assert not entry.settled


def test_the_agreement_carries_the_question_and_is_not_asked_again(
    asked: list[list[bool]],
) -> None:
    of = Controlled()
    of.staleness.asked = True
    of.staleness.agree.side_effect = lambda votes: setattr(of.staleness, "asked", False)
    of.entries[0].fallible, of.entries[0].offered = True, 1
    assert of.gather().hit
    assert asked == [[False] * 6]
    of.cache.has_offered.return_value = False
    of.staleness.asked, of.entries[0].settled = True, False
    assert not of.gather().hit
    assert asked[1:] == [[False] * 5 + [True]]


def test_a_unit_of_a_part_is_asked_for_among_its_ranks(asked: list[list[bool]]) -> None:
    """The agreement has as many flags; and nobody is answered in it where one rank cannot ask."""
    of = Controlled()
    of.staleness.agree.side_effect = lambda votes: setattr(of.staleness, "asked", False)
    for entry in of.entries:
        entry.fallible, entry.offered = True, 1
    shared, alone = of.units
    alone.topology = Place(2, 0)
    of.staleness.asked = True
    assert of.gather(1).hit
    assert asked == [[False] * 4 + [True, False], [False]]
    with mock.patch("fcdp.pass_controller.any_rank") as any_rank:
        any_rank.side_effect = [[False] * 4 + [True, True], [False]]
        of.staleness.asked = True
        assert of.gather(0).hit
        of.gather(1)
    assert [call.args[1] for call in any_rank.mock_calls] == [shared.topology] * 2


@pytest.mark.parametrize("differences", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_a_disk_is_asked_for_what_may_be_used(
    written: bool, differences: bool, asked: list[list[bool]]
) -> None:
    gathers = mock.Mock()
    gathers.votes.return_value, gathers.lacks_base.return_value = [], False
    of = Controlled(gathers=gathers if differences else None)
    of.staleness.asked = True
    of.staleness.votes.return_value = Votes([written, False], [False, False])
    of.entries[0].fallible, of.entries[0].settled = True, True
    of.gather()
    assert asked[0][-2:] == [True, False], "what stays there needs no question"
    of.entries[0].settled = False
    of.gather()
    assert asked[1][-2:] == [False, written and not differences]
    assert [*map(len, asked)] == [6 + 2 * differences] * 2
    assert of.cache.has_offered.called == (differences or not written)


def test_a_unit_of_another_size_is_dropped_and_not_kept() -> None:
    of = Controlled()
    assert not of.gather(resized=True).keep
    assert "cache.drop_resized" in of.names()
    assert of.gather().keep
    assert of.names().count("cache.drop_resized") == 1


def test_a_write_in_mid_pass_is_looked_at() -> None:
    of = Controlled()
    of.gather()
    assert "staleness.look_at" not in of.names()
    of.staleness.watched[of.units[0]].stamp = 1
    of.gather()
    of.staleness.look_at.assert_called_once_with(of.units[0])


def test_on_one_node_nothing_is_asked_for() -> None:
    of = Controlled(nodes=1)
    of.staleness.asked = True
    assert of.gather() == Decision()
    assert of.names() == []


@pytest.mark.parametrize("gradients", [True, False])
def test_a_forward_begins_a_pass_and_ends_it(gradients: bool) -> None:
    of = Controlled()
    with torch.set_grad_enabled(gradients):
        of.model(torch.ones(1, 1))
    names = of.names()
    begins = ["in_flight.finish", "failures.begins", "staleness.begin_pass", "cache.begin_pass"]
    assert [name for name in names if name in begins] == begins
    assert names[-1] == "failures.forward_ends"
    # Kept until then by FCDP: a forward that raised may have left it, and one without gradients.
    assert of.units[0].module.reshard.call_count == 1 + (not gradients)
    assert of.units[1].module.reshard.call_count == 0


def test_gathers_of_a_forward_belong_to_its_pass(fsdp2: mock.Mock) -> None:
    of = Controlled()
    of.controller.begin_pass()
    of.calls.reset_mock()
    of.gather(forward=True)
    assert "failures.begins" not in of.names()
    of.controller.end_pass()
    of.calls.reset_mock()
    of.gather(forward=True)
    assert of.names()[:4] == [
        *("in_flight.finish", "failures.begins", "cache.begin_pass", "staleness.begin_pass")
    ]


def test_ranks_are_told_whether_the_pass_computes_gradients(fsdp2: mock.Mock) -> None:
    of = Controlled()
    of.staleness.asked = True
    asked_to_gather = fsdp2.around_gathers.call_args_list[0].kwargs["before"]

    def without_gradients() -> bool:
        told: bool = of.staleness.votes.call_args.kwargs["without_gradients"]
        return told

    of.gather()
    assert not without_gradients()
    of.gather(forward=True)
    assert not without_gradients()
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            asked_to_gather()
            of.gather(forward=True)
            assert without_gradients() != enabled
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            of.controller.begin_pass()
            of.gather(forward=True)
            assert without_gradients() != enabled


def test_an_own_pass_keeps_all_that_it_gathers() -> None:
    of = Controlled()
    of.entries[0].unit.reuses = 0
    assert not of.gather().keep
    assert of.gather(forward=True).keep


def test_the_first_hook_of_a_forward_begins_its_pass_and_an_error_ends_it() -> None:
    order: list[str] = []
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda *_: order.append("a user's"))
    of = Controlled(model=model)
    of.calls.failures.begins.side_effect = lambda: order.append("begins")
    of.calls.failures.forward_ends.side_effect = lambda: order.append("ends")
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 2))
    assert order == ["begins", "a user's", "ends"]


def test_what_was_prefetched_and_skipped_is_dropped(fsdp2: mock.Mock) -> None:
    of = Controlled()
    follow = fsdp2.around_gathers.call_args_list[1].kwargs
    fsdp2.prefetched.side_effect = lambda group: "a gather" if group == "b" else None
    skipped = of.units[1].module
    # FSDP2 cannot tell this from the user's call.
    fsdp2.by_hand.return_value = True
    skipped.unshard.side_effect = follow["asked_for"]
    for transition in (of.controller.begin_pass, of.controller.end_pass):
        transition()
        assert [name for name, *_ in skipped.mock_calls] == ["unshard", "reshard"]
        assert not of.units[0].module.unshard.called
        skipped.reset_mock()
    try:
        raise ValueError("of a forward")
    except ValueError:
        of.controller.end_pass()
    assert not skipped.mock_calls, "FSDP2 is in the middle of something"
    follow["asked_for"]()
    of.controller.end_pass()
    assert not skipped.mock_calls, "the user wants it gathered"


def test_a_step_ends_what_a_backward_left(fsdp2: mock.Mock) -> None:
    of = Controlled()
    of.controller.before_step()
    assert "in_flight.finish" in of.names()
    assert of.units[0].module.reshard.call_count == 1
    fsdp2.keeps_root.return_value = False  # the user says otherwise
    of.controller.before_step()
    assert of.units[0].module.reshard.call_count == 1


def test_after_an_error_without_gradients_nothing_is_resharded() -> None:
    of = Controlled()
    try:
        raise ValueError("of a forward")
    except ValueError:
        with torch.no_grad():
            of.controller.end_pass()
    assert of.units[0].module.reshard.call_count == 0


def test_what_fcdp_keeps_gathered_is_left_open(fsdp2: mock.Mock) -> None:
    of = Controlled()
    fsdp2.leave_open.assert_called_once_with(of.units[0].module)


def test_an_outermost_module_begins_one_pass_and_lets_go_when_it_ends(fsdp2: mock.Mock) -> None:
    of = Controlled()
    fsdp2.outermost.return_value = "a module's state"
    for place in (0, 1, 0):
        of.gather(place, forward=True)
    assert of.names().count("failures.begins") == 1
    (state, ended), _ = fsdp2.when_forward_ends.call_args
    assert state == "a module's state"
    fsdp2.prefetched.side_effect = lambda group: "a gather" if group == "b" else None
    with torch.no_grad():
        ended()
    assert [unit.module.reshard.call_count for unit in of.units] == [1, 1]
    of.gather(forward=True)
    assert of.names().count("failures.begins") == 2


def test_under_accumulation_an_own_pass_continues_the_order() -> None:
    of = Controlled()
    of.controller.requires_sync = False
    of.gather(forward=True)
    assert "cache.begin_pass" not in of.names()
    assert "staleness.begin_pass" in of.names()


def test_what_stays_gathered_is_kept_once_it_was_missed() -> None:
    """Without a step in between another forward reads it: the guess was wrong."""
    of = Controlled()
    entry = of.entries[0]
    entry.unit.reuses = 0
    of.model(torch.ones(1, 1))
    assert not of.gather().keep
    entry.passed_over = entry.generation  # noted when it has arrived
    assert of.gather().keep
    entry.missed, entry.generation = True, 2  # as the cache notes when it stores it
    assert of.gather().keep
    other = of.entries[1]
    other.unit.reuses = 0
    of.controller.requires_sync = False
    assert of.gather(1).keep, "the next micro-batch reads it"
    of.controller.requires_sync = True
    assert not of.gather(1).keep
    with torch.no_grad():
        of.model(torch.ones(1, 1))
    assert of.gather(1).keep, "no optimizer steps"


def test_differences_lead_from_what_all_hold() -> None:
    gathers = mock.Mock()
    gathers.votes.return_value = []
    of = Controlled(gathers=gathers)
    entry = of.entries[0]
    entry.unit.reuses = 0
    for wants, based, held in ((True, True, True), (False, True, True), (True, False, True)):
        gathers.wants.return_value, entry.based = wants, based
        of.cache.has_offered.return_value = held
        assert of.gather().difference == (wants and based and held)
        assert of.gather().keep == wants
    entry.based = True
    of.cache.has_offered.return_value = False
    assert not of.gather().difference


def test_after_a_pass_that_failed_on_all_ranks_all_is_gathered_anew() -> None:
    of = Controlled()
    of.calls.failures.begins.return_value = True
    of.controller.begin_pass()
    assert "staleness.invalidate" in of.names()


def test_look_ahead_is_of_the_pass_before() -> None:
    of = Controlled()
    for coming in ([], [of.entries[1]]):
        of.controller.begin_pass()
        assert of.gather(0).coming == coming
        of.gather(1)
    of.controller.begin_pass()
    assert of.gather(1).coming == [], "the pass has taken another path"


@pytest.mark.parametrize(("rank", "hints"), [(0, 1), (1, 0)])
def test_rank_0_says_once_that_gradients_cross_again(
    rank: int, hints: int, caplog: pytest.LogCaptureFixture
) -> None:
    of = Controlled(rank=rank)
    of.units[0].params = (param(None), param([0.0, 1.0]))
    with caplog.at_level(logging.WARNING, "fcdp"):
        for _ in range(2):
            of.controller.begin_pass()
            for _ in range(2):  # reductions of one backward
                of.controller.note_crossing(of.units[0])
            of.controller.before_step()
        assert not caplog.records
        for _ in range(3):
            of.controller.begin_pass()
            of.controller.note_crossing(of.units[0])
    assert len(caplog.records) == hints


def test_gradients_that_cross_again_are_those_since_the_last_step_that_nobody_has_zeroed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = Controlled()
    first, second = of.units
    first.params, second.params = (param(None), param([0.0])), (param([1.0]),)
    of.controller.begin_pass()  # of an evaluation
    of.controller.begin_pass()
    of.controller.note_crossing(second)
    of.controller.begin_pass()
    of.controller.note_crossing(first)
    assert not caplog.records
    of.controller.note_crossing(second)
    assert len(caplog.records) == 1


def test_the_first_pass_counts(caplog: pytest.LogCaptureFixture) -> None:
    of = Controlled()
    of.units[0].params = (param([1.0]),)
    for hints in (0, 1):
        of.controller.begin_pass()
        of.controller.note_crossing(of.units[0])
        assert len(caplog.records) == hints


def test_whoever_accumulates_needs_no_hint(caplog: pytest.LogCaptureFixture) -> None:
    of = Controlled()
    of.controller.accumulates()
    of.units[0].params = (param([1.0]),)
    for _ in range(2):
        of.controller.begin_pass()
        of.controller.note_crossing(of.units[0])
    assert not caplog.records


def test_what_a_user_gathers_by_hand_stays(fsdp2: mock.Mock) -> None:
    of = Controlled()
    follow = fsdp2.around_gathers.call_args_list[0].kwargs
    fsdp2.by_hand.return_value = True
    follow["asked_for"]()
    of.controller.let_go()
    assert of.units[0].module.reshard.call_count == 0
    follow["resharded"]()
    of.controller.let_go()
    assert of.units[0].module.reshard.call_count == 1
