"""Speeds are of rounds, whose intervals hold the median as often as they say."""

from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.records.comparison import (
    FEWEST,
    ONE_IN,
    Comparison,
    few,
    interval,
    left_out,
    paired,
    reference,
    spread,
)
from experiments.records.record import Record
from tests.experiments.stand_in import cell, record

SECONDS = st.lists(st.floats(min_value=0.01, max_value=100), min_size=1, max_size=40)


def ran(seconds: Sequence[float], **figures: Any) -> Record:
    return record(cell(), step_seconds=list(seconds), **figures)


@pytest.mark.parametrize("rounds", range(1, 15))
def test_an_interval_holds_the_median_as_often_as_it_says(rounds: int) -> None:
    below = [sum(sides) for sides in product((0, 1), repeat=rounds)]

    def held(out: int) -> float:
        return sum(out < number < rounds - out for number in below) / len(below)

    assert (held(left_out(rounds)) >= 1 - 1 / ONE_IN) == (rounds >= FEWEST)
    assert held(left_out(rounds) + 1) < 1 - 1 / ONE_IN  # no narrower one does


@given(SECONDS, SECONDS)
def test_a_ratio_is_in_its_interval_and_the_other_way_round_it_is_the_inverse(
    ours: list[float], theirs: list[float]
) -> None:
    mine, twice = ran(ours), record(cell(micro_batch=2), step_seconds=theirs)
    pair, inverse = Comparison(mine, twice), Comparison(twice, mine)
    assert pair.ratio == pytest.approx(median(theirs) / median(ours) / 2)  # of half the tokens
    assert pair.interval[0] <= pair.ratio * (1 + 1e-9)  # type: ignore[operator]
    assert pair.interval[1] >= pair.ratio * (1 - 1e-9)  # type: ignore[operator]
    assert [1 / end for end in reversed(inverse.interval)] == pytest.approx(list(pair.interval))
    assert pair.differs == inverse.differs
    assert pair.decides == (min(len(ours), len(theirs)) >= FEWEST)


@given(SECONDS)
def test_more_rounds_of_the_same_kind_widen_no_interval(seconds: list[float]) -> None:
    narrower, wider = interval(seconds * 3), interval(seconds)
    assert wider[0] <= narrower[0] <= narrower[1] <= wider[1]


def test_rounds_count_and_not_the_steps_that_wait_for_none_of_it() -> None:
    """Medians of steps are far apart, as one step per round waits; the rounds are alike."""
    rounds = [[0.1, 0.1, wait] for wait in (1.0, 1.2, 1.1, 0.9, 1.3, 1.15, 1.05)]
    ours = ran([step for each in rounds for step in each], steps_per_round=3)
    theirs = ran([sum(each) / 3 for each in reversed(rounds)])
    pair = Comparison(ours, theirs)
    assert (pair.rounds, pair.decides, pair.differs) == (7, True, False)
    assert pair.ratio == pytest.approx(1)
    assert spread(ours) == pytest.approx(spread(theirs))


def test_what_is_simulated_is_as_it_is() -> None:
    ours, theirs = (
        ran([seconds]).model_copy(update={"evidence": "simulated"}) for seconds in (1.0, 2.0)
    )
    pair = Comparison(ours, theirs)
    assert pair.interval == (2.0, 2.0)
    assert (pair.timed, pair.decides, pair.differs) == (False, True, True)
    assert few([pair]) is None
    assert "1 speed-up is of fewer than 6 rounds" in str(few([Comparison(ran([1.0]), ran([2.0]))]))


def test_a_cell_without_a_speed_has_no_ratio_and_no_interval() -> None:
    failed = record(cell(), "failed", "an error")
    for pair in (Comparison(failed, ran([1.0])), Comparison(ran([1.0]), None)):
        assert (pair.ratio, pair.interval, pair.differs) == (None, None, False)
        assert few([pair]) is None
    assert spread(failed) is None
    assert reference([failed]) is None


def test_each_is_paired_with_the_one_that_is_alike_and_no_other() -> None:
    assert list(paired([1, 2, 3], [13, 11, 15], lambda number: number % 10)) == [(1, 11), (3, 13)]
