"""Exchanges that a failed pass has left in flight end, or end in an error, soon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcdp import watcher
from fcdp.failure import Failures, RankFailed
from tests.ranks import Pools

#: Far below the groups' time-out, far above what the machine needs under load.
SOON_S = 100.0


class Exchanges:
    """Of all ranks, over a group of their own that a failure may break."""

    def __init__(self, name: str) -> None:
        self._group: Any = dist.new_group(timeout=timedelta(seconds=150))
        self.failures = Failures(name, [self._group])

    def issue(self) -> dist.Work:
        """Start one, which is waited for later."""
        with self.failures.waiting():
            work: dist.Work = self._group.allreduce([torch.ones(3)])
        return work

    def complete(self, work: dist.Work) -> None:
        with self.failures.completing():
            work.wait()

    def run(self) -> None:
        with self.failures.waiting():
            self._group.allreduce([torch.ones(3)]).wait()


@contextlib.contextmanager
def exchanges(name: str) -> Iterator[Exchanges]:
    poll, watcher.POLL_S = watcher.POLL_S, 0.1
    try:
        yield Exchanges(name)
    finally:
        watcher.POLL_S = poll
        dist.barrier()  # of the pool's own group: all have seen what they had to see


def ended(work: Callable[[], None]) -> str:
    """What ends ``work`` in another's stead, if it ends soon."""
    began = time.monotonic()
    try:
        work()
    except RankFailed as error:
        assert time.monotonic() - began < SOON_S
        return str(error)
    return "done"


def left_in_flight(late: float) -> str:
    """All ranks fail with an exchange in flight, which rank 1 issues ``late`` seconds late."""
    with exchanges(f"left {late}") as every:

        def passes() -> None:
            every.failures.begins()
            every.run()
            if dist.get_rank() == 1:
                time.sleep(late)
            work = every.issue()
            every.failures.announce(ValueError("no label"))
            every.complete(work)
            every.failures.begins()
            every.run()

        return ended(passes)


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_ranks_that_fail_alike_go_on_with_what_they_left_in_flight(
    ranks: Pools, late: float
) -> None:
    """Also where the others have looked many times whether it can end."""
    assert ranks.run(4, left_in_flight, late) == ["done"] * 4


def never_issued() -> str:
    """All ranks fail, but rank 3 before the exchange that the others leave in flight."""
    with exchanges("never issued") as every:

        def passes() -> None:
            every.failures.begins()
            every.run()
            if dist.get_rank() == 3:
                every.failures.announce(KeyError("batch"))
            dist.barrier()  # rank 3 is the first
            if dist.get_rank() != 3:
                work = every.issue()
                every.failures.announce(ValueError("no label"))
                every.complete(work)
            every.failures.begins()
            every.run()

        return ended(passes)


def test_what_a_failed_rank_never_issued_ends_on_all_with_its_error(ranks: Pools) -> None:
    assert ranks.run(4, never_issued) == ["rank 3 failed: KeyError: 'batch'"] * 4


def places() -> list[int | None]:
    """Before and after a rank has waited, once, or not at all, for what it issued."""
    with exchanges("places") as every:
        every.failures.begins()
        work = every.issue()
        before = every.failures.place
        if dist.get_rank() == 0:
            every.complete(work)
        return [before, every.failures.place]


def test_ranks_may_wait_at_different_times_and_are_at_the_same_place(ranks: Pools) -> None:
    answers = ranks.run(2, places)
    assert len({place for found in answers for place in found}) == 1


def broken_while_completing() -> list[str]:
    """What each rank's next exchanges say after rank 0's connection has broken in a wait."""
    with exchanges("broken") as every:

        def completes(error: Exception) -> None:
            with every.failures.completing():
                raise error

        every.failures.begins()
        with pytest.raises(ValueError, match="no label"):
            completes(ValueError("no label"))
        every.run()  # which is nobody's failure
        if dist.get_rank() == 0:
            with pytest.raises(RankFailed):
                completes(RuntimeError("Connection closed by peer"))
        return [ended(every.run), ended(lambda: completes(ValueError("is not reached")))]


def test_a_connection_that_breaks_is_told_to_all(ranks: Pools) -> None:
    for seen in ranks.run(2, broken_while_completing):
        for message in seen:
            assert "rank 0 could not exchange with another rank" in message
            assert "Connection closed by peer" in message
