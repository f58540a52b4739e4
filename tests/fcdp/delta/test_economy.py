"""Differences are sent where they pay."""

import time

import pytest

from fcdp.delta.economy import Economy, Mean, Watch

SHARD = 2**20


class Exchange:
    """An exchange that takes a time of its own, and like gloo never says that it has ended."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock[0] += self._seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def _after(*waits: float, nbytes: int = SHARD) -> Economy:
    economy = Economy("pays")
    economy.encoding.add(2e-9)
    economy.applied.add(1e-9)
    for seconds in waits:
        economy.saw_whole(seconds, nbytes)
    return economy


def test_the_wait_is_counted_and_not_what_went_before(clock: list[float]) -> None:
    watch = Watch([Exchange(clock, 0.25), Exchange(clock, 0.5)])
    assert watch.waited == 0.0
    clock[0] += 60  # computation
    watch.wait()
    assert watch.waited == pytest.approx(0.75)
    assert watch.took == pytest.approx(60.75)


def test_whole_until_exchanges_were_waited_for() -> None:
    assert not _after().pays(0.1, 1)
    assert not _after(1.0).pays(0.1, 1)
    assert not _after(0.0, 0.0, 0.0).pays(0.1, 1)
    assert Economy("always").pays(1.0, 1)


def test_coding_is_held_against_the_wait() -> None:
    """3 nanoseconds of coding a byte pay where 9 of 10 bytes saved are waited for longer."""
    more, less = 3.4e-9 * SHARD, 3.3e-9 * SHARD
    assert _after(more, more).pays(0.1, 1)
    assert not _after(less, less).pays(0.1, 1)
    assert not _after(more, more).pays(0.5, 1)


def test_a_rank_that_came_late_once_is_not_taken_for_a_slow_link() -> None:
    assert not _after(2.0, 1e-9 * SHARD).pays(0.1, 1)


def test_what_was_long_ago_is_forgotten() -> None:
    slow = 1e-7 * SHARD
    assert _after(0.0, *[slow] * 8).pays(0.1, 1)
    assert not _after(0.0, *[slow] * 7).pays(0.1, 1)


def test_a_link_that_has_become_faster_is_learned_again() -> None:
    economy = _after(1.0, 1.0)
    for took in (*[0.5] * 6, 0.3, 0.2):  # the usual: 0.2
        assert not economy.faster
        economy.saw_coded(took, SHARD)
    for took, faster in (*[(0.09, False)] * 7, (0.0999, True), (0.1, False)):
        economy.saw_coded(took, SHARD)
        assert economy.faster is faster
    assert economy.pays(0.1, 1)
    economy.measure_again()
    assert not economy.faster
    assert not economy.pays(0.1, 1)
    # Another usual, 0.01 a byte: shards of no bytes are taken for ones of one.
    for took, nbytes, faster in ((0.02, 2, False), (0.006, 0, False), (0.004, 0, True)):
        for _ in range(8):
            economy.saw_coded(took, nbytes)
        assert economy.faster is faster
    for _ in range(2):
        economy.saw_whole(1.0, SHARD)
    assert economy.pays(0.1, 1)


def test_a_mean_forgets() -> None:
    mean = Mean()
    assert mean.value is None
    mean.add(8.0)
    assert mean.value == 8.0
    mean.add(4.0)
    assert mean.value == 7.0  # a quarter of the last observation counts
    for _ in range(40):
        mean.add(1.0)
    assert mean.value is not None
    assert mean.value == pytest.approx(1.0, abs=1e-3)


def test_what_is_not_known_yet_takes_no_time() -> None:
    economy = Economy("pays")
    for _ in range(2):
        economy.saw_whole(1.0, 2**16)
    assert economy.pays(0.5, 1)
    assert not economy.pays(1.0, 1)  # saves nothing
    assert not _after(1.0, 1.0, nbytes=2**16 - 1).pays(0.1, 1)


def test_entropy_codes_are_held_against_the_wait_that_they_save_beside_packed_ones() -> None:
    """2 nanoseconds more of coding a byte pay where 1 of 20 bytes less is waited for longer."""
    for wait, pays in ((4.1e-8, True), (3.9e-8, False)):
        economy = _after(wait * SHARD, wait * SHARD)
        assert economy.finer_pays(0.1, 0.05, 1)  # it is not known yet what they take
        economy.finer.add(4e-9)
        assert economy.finer_pays(0.1, 0.05, 1) is pays
        assert economy.finer_pays(0.1, 0.05, 2)
        assert not economy.finer_pays(0.05, 0.05, 1)
    slow = _after(1e-7 * SHARD, 1e-7 * SHARD)
    assert not slow.finer_pays(0.05, 0.1, 1)  # not known, but no gain
    late = _after(2.0, 1e-9 * SHARD)
    late.finer.add(4e-9)
    assert not late.finer_pays(0.1, 0.05, 1)
    for wait, pays in ((7e-8, False), (9e-8, True)):
        economy = Economy("pays")
        for _ in range(2):
            economy.saw_whole(wait * SHARD, SHARD)
        assert not economy.finer_pays(0.05, 0.05, 1)
        economy.finer.add(4e-9)
        assert economy.finer_pays(0.1, 0.05, 1) is pays
    assert not Economy("always").finer_pays(1.0, 0.0, 1)
    assert Economy("smallest").finer_pays(0.0, 1.0, 1)
    assert Economy("smallest").pays(1.0, 1)
