"""The search ends at the largest micro-batch that fits, after few steps."""

from hypothesis import given
from hypothesis import strategies as st

from simulation.imitated.study import PAPER_MICRO_BATCH, largest_fitting

LINES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), min_size=1, max_size=3)


class Peak:
    """Peak: the maximum of lines of a base and a slope. It notes the micro-batches asked for."""

    def __init__(self, *lines: tuple[int, int]) -> None:
        self.lines = lines
        self.asked: list[int] = []

    def __call__(self, micro_batch: int) -> int:
        self.asked.append(micro_batch)
        return max(base + slope * micro_batch for base, slope in self.lines)


@given(LINES, st.integers(0, 10**7), st.integers(0, 10**7))
def test_it_finds_the_last_that_fits_of_any_convex_peak(
    lines: list[tuple[int, int]], usable: int, about_one: int
) -> None:
    peak = Peak(*lines)
    largest = largest_fitting(peak, usable, about_one)
    # Both were run, unless none fits; and the paper's own was.
    assert {largest + 1, PAPER_MICRO_BATCH} <= set(peak.asked)
    assert min(peak.asked) >= 1
    assert largest == 0 or peak(largest) <= usable
    assert peak(largest + 1) > usable


def test_it_takes_few_steps() -> None:
    line = Peak((1000, 10))
    assert largest_fitting(line, 2005, about_one=1010) == 100
    assert line.asked == [8, 100, 101]
    bent = Peak((20_000, 10), (16_000, 670))  # the optimizer's peak at first, then the activations'
    assert largest_fitting(bent, 44_000, about_one=20_010) == 41
    assert len(bent.asked) <= 6
    assert largest_fitting(Peak((0, 100)), 99, about_one=100) == 0
