"""The search ends at the largest micro-batch that fits, after few steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulation.imitated.study import PAPER_MICRO_BATCH, largest_fitting

LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), min_size=1, max_size=3)


@given(LINES, st.integers(0, 10**7), st.integers(0, 10**7))
def test_it_finds_the_last_that_fits_of_any_convex_peak(
    lines: list[tuple[int, int]], usable: int, about_one: int
) -> None:
    asked = []

    def peak(micro_batch: int) -> int:
        asked.append(micro_batch)
        return max(base + slope * micro_batch for base, slope in lines)

    largest = largest_fitting(peak, usable, about_one)
    assert largest == 0 or peak(largest) <= usable
    assert peak(largest + 1) > usable
    # Both were run, unless none fits; and the paper's own was.
    assert {largest + 1, PAPER_MICRO_BATCH} <= set(asked)
    assert min(asked) >= 1


def test_on_one_line_it_takes_three_steps() -> None:
    asked = []

    def peak(micro_batch: int) -> int:
        asked.append(micro_batch)
        return 1000 + 10 * micro_batch

    assert largest_fitting(peak, 2005, about_one=1010) == 100
    assert asked == [8, 100, 101]


def test_where_the_line_bends_it_is_still_near_soon() -> None:
    asked = []

    def peak(micro_batch: int) -> int:  # the optimizer's peak at first, then the activations'
        asked.append(micro_batch)
        return max(20_000 + 10 * micro_batch, 16_000 + 670 * micro_batch)

    assert largest_fitting(peak, 44_000, about_one=20_010) == 41
    assert len(asked) <= 6


def test_none_may_fit() -> None:
    assert largest_fitting(lambda micro_batch: 100 * micro_batch, 99, about_one=100) == 0
