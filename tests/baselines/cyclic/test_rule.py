"""The update rules, the stages, and every message sent before the slot that needs it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.cyclic.routes import (
    KINDS,
    Cycle,
    Kind,
    backward_slot,
    crossing,
    forward_slot,
    is_fresh,
    partition,
    slots_per_step,
)
from baselines.settings import UpdateRule

STAGES = st.integers(1, 12)


@given(STAGES)
def test_v2_uses_the_newest_that_is_there(stages: int) -> None:
    """A stage's new parameters are there after its last micro-batch's backward."""
    for micro_batch in range(stages):
        for stage in range(stages):
            there = backward_slot(stages - 1, stage, stages) + 1
            comes = slots_per_step(stages) + forward_slot(micro_batch, stage)
            assert is_fresh("v2", micro_batch, stage, stages) == (there <= comes)


@given(STAGES)
def test_each_stage_has_one_micro_batch_in_every_slot(stages: int) -> None:
    period = slots_per_step(stages)
    used = Counter(
        (slot % period, stage)
        for micro_batch in range(stages)
        for stage in range(stages)
        for slot in (forward_slot(micro_batch, stage), backward_slot(micro_batch, stage, stages))
    )
    assert used == Counter((slot, stage) for slot in range(period) for stage in range(stages))


def test_v1_is_alike_for_all() -> None:
    assert not any(is_fresh("v1", i, j, 3) for i in range(3) for j in range(3))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.data())
def test_every_block_is_in_one_stage_in_order(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    runs = partition(costs, stages)
    assert len(runs) == stages
    assert all(run for run in runs)
    assert [index for run in runs for index in run] == [*range(len(costs))]


def test_cuts_are_where_costs_are_nearest() -> None:
    assert partition([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert partition([9, 1, 1, 1], 2) == [range(1), range(1, 4)]
    assert partition([1, 1, 1, 9], 2) == [range(3), range(3, 4)]
    assert partition([0, 0, 0], 3) == [range(1), range(1, 2), range(2, 3)]


@st.composite
def cycles(draw: st.DrawFn) -> Cycle:
    ranks = draw(st.integers(1, 9))
    rule: UpdateRule = draw(st.sampled_from(["v1", "v2"]))
    return Cycle(rule, ranks, draw(st.integers(1, ranks)), draw(st.booleans()))


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


@given(cycles())
def test_a_rank_sends_at_most_one_message_in_a_slot_or_two_in_backward(cycle: Cycle) -> None:
    used = Counter((m.source, m.sent) for m in cycle.messages())
    assert max(used.values()) <= 1 + cycle.twice


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
