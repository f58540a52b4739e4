"""Differences are told where they pay."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import fcdp
from fcdp.delta import economy as economies
from fcdp.delta.economy import Economy, Mean

SHARD = 2**20


class Exchange(dist.Work):
    """One that takes a time of its own, or ended before anybody asked."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def is_completed(self) -> bool:
        return self._seconds == 0

    def wait(self, timeout: object = None) -> bool:
        self._clock[0] += self._seconds
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(economies.time, "perf_counter", lambda: now[0])
    return now


def _after(clock: list[float], seconds: float, nbytes: int = SHARD) -> Economy:
    economy = Economy("pays")
    economy.told.add(2e-9)
    economy.applied.add(1e-9)
    for work in economy.watched([Exchange(clock, seconds)], nbytes):
        work.wait()
    return economy


def test_whole_until_an_exchange_was_waited_for(clock: list[float]) -> None:
    assert not Economy("pays").pays(SHARD, 0.1, 1)
    assert not _after(clock, 0.0).pays(SHARD, 0.1, 1)
    assert Economy("always").pays(SHARD, 1.0, 1)


def test_coding_is_held_against_the_link(clock: list[float]) -> None:
    """3 nanoseconds of coding a byte pay where 9 of 10 bytes saved take more than that."""
    assert _after(clock, 3.4e-9 * SHARD).pays(SHARD, 0.1, 1)
    assert not _after(clock, 3.3e-9 * SHARD).pays(SHARD, 0.1, 1)
    assert not _after(clock, 3.4e-9 * SHARD).pays(SHARD, 0.5, 1)


def test_one_is_told_to_all_but_applied_from_each(clock: list[float]) -> None:
    """With three other nodes, 5 nanoseconds of coding save three times the bytes."""
    assert _after(clock, 1.9e-9 * SHARD).pays(SHARD, 0.1, 3)
    assert not _after(clock, 1.8e-9 * SHARD).pays(SHARD, 0.1, 3)


def test_small_exchanges_tell_nothing_of_the_rate(clock: list[float]) -> None:
    assert not _after(clock, 1.0, nbytes=1000).pays(SHARD, 0.1, 1)


def test_a_mean_forgets() -> None:
    mean = Mean()
    assert mean.value is None
    mean.add(8.0)
    assert mean.value == 8.0
    for _ in range(40):
        mean.add(1.0)
    assert mean.value is not None
    assert mean.value == pytest.approx(1.0, abs=1e-3)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="when = 'often': must be 'pays' or 'always'"):
        fcdp.Delta("often")  # type: ignore[arg-type]
