"""The update rules, and that v2 is what the slots allow."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.cyclic.rule import backward_slot, forward_slot, is_fresh, slots_per_step

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
        for slot in (
            forward_slot(micro_batch, stage),
            backward_slot(micro_batch, stage, stages),
        )
    )
    assert used == Counter((slot, stage) for slot in range(period) for stage in range(stages))


@given(STAGES)
def test_the_last_micro_batch_is_fresh_and_the_first_but_in_its_last_stage(stages: int) -> None:
    last = [is_fresh("v2", stages - 1, stage, stages) for stage in range(stages)]
    first = [is_fresh("v2", 0, stage, stages) for stage in range(stages)]
    assert last == [True] * stages
    assert first == [False] * (stages - 1) + [True]


@pytest.mark.parametrize(("rule", "fresh"), [("dp", True), ("v1", False)])
def test_the_others_are_alike_for_all(rule: str, fresh: bool) -> None:
    found = {is_fresh(rule, i, j, 3) for i in range(3) for j in range(3)}  # type: ignore[arg-type]
    assert found == {fresh}
