"""Pools of ranks: what one test leaves behind is nobody else's."""

from __future__ import annotations

import operator
import signal
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.ranks import Pools

pytestmark = pytest.mark.ranks


class _TimeLimit(Exception):
    pass


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _TimeLimit


def test_answers_of_an_interrupted_test_are_not_the_next_ones(pools: Pools) -> None:
    """As by a limit of time, which raises wherever the test is."""
    assert pools.run(1, operator.add, 0, 1) == [1]
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(_TimeLimit):
            pools.run(1, time.sleep, 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pools.run(1, operator.add, 2, 3) == [5]
