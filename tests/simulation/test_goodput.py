"""The share of the time that trains."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.goodput import goodput

SECONDS = st.floats(0, 1e4)


@given(SECONDS, st.floats(1, 1e9), SECONDS)
def test_it_is_a_share_that_failures_lower(save: float, mean: float, restart: float) -> None:
    share = goodput(save, mean, restart)
    assert 0 <= share <= 1
    assert goodput(save, 2 * mean, restart) >= share - 1e-9
    assert goodput(save, mean, restart + 1) <= share


def test_young_s_interval_and_its_loss() -> None:
    # A save of 60 s, a failure a day: √(2 · 60 · 86,400) = 3,220 s between saves, 3.7 % lost.
    assert goodput(60, 86_400, 0) == pytest.approx(1 - math.sqrt(2 * 60 / 86_400), abs=1e-3)
    assert goodput(60, math.inf, 300) == 1
    assert goodput(3600, 60, 300) == pytest.approx(0)
    assert goodput(0, 1, 709) == 0


def test_a_time_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="save_seconds = -1"):
        goodput(-1, 1, 1)
