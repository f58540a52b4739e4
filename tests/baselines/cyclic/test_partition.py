"""Stages are consecutive blocks of about equal cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.cyclic.rule import partition


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


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_blocks_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=f"stages = {stages}: allowed are 1 to 3"):
        partition([1, 1, 1], stages)
    with pytest.raises(ValueError, match="costs = .*: allowed are numbers from 0"):
        partition([1, -1], 1)
