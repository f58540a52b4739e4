"""Every message is sent before the slot that needs it, and each rank has each version once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.cyclic.routes import KINDS, Cycle, Kind, crossing
from baselines.cyclic.rule import Rule, backward_slot, forward_slot, is_fresh


@st.composite
def cycles(draw: st.DrawFn, twice: bool | None = None) -> Cycle:
    ranks = draw(st.integers(1, 9))
    rule: Rule = draw(st.sampled_from(["v1", "v2"]))
    again = draw(st.booleans()) if twice is None else twice
    return Cycle(rule, ranks, draw(st.integers(1, ranks)), again)


@given(cycles())
def test_messages_are_sent_in_an_earlier_slot_than_needed(cycle: Cycle) -> None:
    for message in cycle.messages():
        assert message.sent < message.needed, message


@given(cycles())
def test_an_owner_comes_to_its_stage_when_the_last_micro_batch_has_left_it(cycle: Cycle) -> None:
    for stage in range(cycle.stages):
        left = backward_slot(cycle.ranks - 1, stage, cycle.stages)
        assert 2 * cycle.ranks + forward_slot(cycle.owner(stage), stage) == left + 1
        assert is_fresh("v2", cycle.owner(stage), stage, cycle.stages)


@given(cycles())
def test_parameters_have_the_age_that_the_rule_says(cycle: Cycle) -> None:
    """Followed from the owner: how many steps after its update each rank computes with them."""
    for kind in ("forward", "backward") if cycle.twice else ("forward",):
        for stage in range(cycle.stages):
            hops = {m.source: m for m in cycle.messages() if (m.kind, m.stage) == (kind, stage)}
            rank, age = cycle.owner(stage), 0
            reached = {rank}
            while rank in hops:
                age += hops[rank].later
                rank = hops[rank].target
                reached.add(rank)
                assert age == (0 if is_fresh(cycle.rule, rank, stage, cycle.stages) else 1)
            assert reached == set(range(cycle.ranks))


@given(cycles(twice=False))
def test_a_rank_sends_at_most_one_message_in_a_slot(cycle: Cycle) -> None:
    used = Counter((m.source, m.sent) for m in cycle.messages())
    assert max(used.values()) == 1


@given(cycles(twice=True))
def test_passing_parameters_twice_makes_it_two_in_backward(cycle: Cycle) -> None:
    used = Counter((m.source, m.sent) for m in cycle.messages())
    assert max(used.values()) <= 2


@pytest.mark.parametrize(("twice", "expected"), [(False, 7), (True, 10)])
def test_bytes_are_counted_where_they_leave_a_node(twice: bool, expected: int) -> None:
    """Four stages of one byte: a rank sends all gradients on, and parameters of three.

    The stage that the rank after it owns ends there. Of two nodes one sends as much as a rank.
    """
    cycle = Cycle("v2", 4, 4, twice)
    sizes: dict[Kind, list[int]] = {kind: [1] * 4 for kind in KINDS}
    assert crossing(cycle, sizes, 1, 4) == expected
    assert crossing(cycle, sizes, 2, 2) == expected
    assert crossing(cycle, sizes, 4, 1) == 0
