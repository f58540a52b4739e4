"""What the simulator assumes of differences is what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.traffic import MEASURED, difference_bits
from tests.simulation.workloads import hardware, predicted

RATES = st.floats(1e-8, 1e-1)


@pytest.mark.parametrize(("rate", "told"), MEASURED)
def test_measured_points_are_met(rate: float, told: float) -> None:
    assert difference_bits(rate, 2) == pytest.approx(told)
    assert difference_bits(rate, 4) == pytest.approx(told + 16)


@given(RATES, RATES)
def test_more_is_told_of_larger_steps_and_never_more_than_all(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 < difference_bits(low, 2) <= difference_bits(high, 2) <= 16


def test_a_rate_that_moves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate = 0: must be more than 0"):
        difference_bits(0, 2)


def test_a_link_without_limit_is_told_no_differences_where_the_rule_decides() -> None:
    on = hardware().with_inter_bandwidth(None)
    whole, decided, always = (
        predicted("fcdp", gather_codec=codec, on=on).inter_node_bytes
        for codec in ("none", "delta", "delta(always)")
    )
    assert decided == whole > always
