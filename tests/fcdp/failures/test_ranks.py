"""A rank that raises ends the waits of the others, with its error in their messages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcdp import failure
from fcdp.exchange import any_rank, swap, wait_all
from fcdp.failure import Failures, RankFailed
from tests.fcdp.failures.made_up import SOON_S
from tests.ranks import Pools


class Exchanges:
    """Exchanges of all ranks, over a group of their own that a failure may break."""

    def __init__(self, name: str) -> None:
        self.group: Any = dist.new_group(timeout=timedelta(seconds=150))
        self.failures = Failures(name, [self.group])

    def issue(self) -> dist.Work:
        """Start one, which is waited for later."""
        with self.failures.waiting():
            work: dist.Work = self.group.allreduce([torch.ones(3)])
        return work

    def complete(self, work: dist.Work) -> None:
        with self.failures.completing():
            work.wait()

    def run(self) -> None:
        with self.failures.waiting():
            self.group.allreduce([torch.ones(3)]).wait()


@contextlib.contextmanager
def exchanges(name: str) -> Iterator[Exchanges]:
    poll, failure.POLL_S = failure.POLL_S, 0.1
    try:
        yield Exchanges(name)
    finally:
        failure.POLL_S = poll
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


def _one_raises_and_is_caught() -> list[str]:
    with exchanges("caught") as every:
        failures, exchange = every.failures, every.run

        def one_pass(fails: bool) -> None:
            failures.begins()
            exchange()
            if fails:
                failures.announce(ValueError("no label"))
                return
            exchange()

        def passes() -> None:
            one_pass(fails=False)
            one_pass(fails=dist.get_rank() == 3)

        # The failed rank goes on, in a pass that nobody else begins.
        return [ended(passes), ended(lambda: one_pass(fails=False))]


def test_a_rank_that_raises_and_goes_on_ends_the_waits_of_the_others(ranks: Pools) -> None:
    *others, failed = ranks.run(4, _one_raises_and_is_caught)
    for seen in others:
        assert seen == ["rank 3 failed: ValueError: no label"] * 2
    assert failed == ["done", "rank 3 failed: ValueError: no label"]


def _all_raise_alike() -> list[str]:
    with exchanges("alike") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            for _ in range(2):
                failures.begins()
                exchange()
                failures.announce(MemoryError("too long a batch"))
                # The others wait for rank 1 in the same pass, for longer than a few polls ...
                time.sleep(0.5 * (dist.get_rank() == 1))
                exchange()
                failures.begins()
                # ... and in the next.
                time.sleep(0.5 * (dist.get_rank() == 2))
                exchange()

        return [ended(passes)]


def test_ranks_that_all_raise_alike_go_on(ranks: Pools) -> None:
    assert ranks.run(4, _all_raise_alike) == [["done"]] * 4


def _one_is_late_to_raise_alike() -> list[str]:
    with exchanges("late") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            failures.begins()
            exchange()
            # The exchange that rank 1 is in ends only after others have announced their errors.
            if dist.get_rank() == 1:
                with failures.waiting():
                    time.sleep(1)
            else:
                with failures.waiting():
                    pass
            failures.announce(MemoryError("too long a batch"))
            failures.begins()
            exchange()

        return [ended(passes)]


def test_a_rank_that_is_about_to_raise_alike_is_left_alone(ranks: Pools) -> None:
    assert ranks.run(4, _one_is_late_to_raise_alike) == [["done"]] * 4


def _one_raises_where_it_leaves_nothing_out() -> list[str]:
    with exchanges("after") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            for _ in range(2):
                failures.begins()
                exchange()
                if dist.get_rank() == 2:
                    failures.announce(ValueError("a metric"))
            failures.begins()
            exchange()

        return [ended(passes)]


def test_an_error_that_one_rank_alone_catches_ends_all(ranks: Pools) -> None:
    """Even after its last exchange of a pass: nobody can tell that there is none."""
    expected = [["rank 2 failed: ValueError: a metric"]] * 4
    assert ranks.run(4, _one_raises_where_it_leaves_nothing_out) == expected


def on_a_device(failures: Failures, steps: int, leaves_out: Callable[[int], bool]) -> None:
    """Passes whose exchange is only queued, so that ranks meet in the flags of a pass alone."""
    topology: Any = SimpleNamespace(
        control_intra=dist.new_group([dist.get_rank()], use_local_synchronization=True),
        control_inter=dist.new_group(timeout=timedelta(seconds=150)),
        failures=failures,
    )
    for step in range(steps):
        failures.begins()
        assert any_rank([step == 1, False], topology) == [step == 1, False]
        if not leaves_out(step):
            with failures.waiting():
                pass


def _raise_at_different_exchanges() -> list[str]:
    with exchanges("different") as every:

        def leaves_out(step: int) -> bool:
            if dist.get_rank() == 1:
                with every.failures.waiting():
                    pass
            every.failures.announce(MemoryError("too long a batch"))
            return True

        return [ended(lambda: on_a_device(every.failures, 2, leaves_out))]


def test_ranks_that_raise_at_different_exchanges_do_not_go_on(ranks: Pools) -> None:
    """One would take for its next exchange what another has left out."""
    for (seen,) in ranks.run(4, _raise_at_different_exchanges):
        assert "ranks are not at the same exchange" in seen


def _prefetch_what_another_never_gathers(numel: int) -> list[str]:
    with exchanges(f"prefetched {numel}") as every:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        topology: Any = SimpleNamespace(
            control_intra=alone, control_inter=every.group, failures=every.failures
        )
        rank = dist.get_rank()

        def passes() -> None:
            every.failures.begins()
            assert any_rank([False], topology) == [False]
            left: Sequence[dist.Work] = []
            arriving, own = torch.zeros(2, numel, dtype=torch.uint8)
            if rank == 1:
                with every.failures.waiting():
                    left = swap([(1 - rank, arriving)], [(1 - rank, own)], every.group)
            every.failures.announce(ValueError(f"row {rank}"))
            every.failures.begins()
            if left:
                with every.failures.waiting():
                    wait_all(left)
            any_rank([False], topology)

        return [ended(passes)]


@pytest.mark.parametrize("numel", [33, 1024])
def test_what_one_rank_alone_left_in_flight_is_not_taken_for_the_next_exchange(
    ranks: Pools, numel: int
) -> None:
    """On the CPU all exchanges of two ranks share a connection, and match in order."""
    for (seen,) in ranks.run(2, _prefetch_what_another_never_gathers, numel):
        assert "ranks are not at the same exchange" in seen


def _two_raise_differently() -> list[str]:
    with exchanges("two") as every:
        failures, exchange = every.failures, every.run
        rank = dist.get_rank()

        def passes() -> None:
            failures.begins()
            exchange()
            if rank == 1:
                failures.announce(KeyError("a"))
            dist.barrier()  # rank 1 has announced before rank 2 does
            if rank == 2:
                failures.announce(ValueError("b"))
            if rank in (0, 3):
                exchange()

        return [ended(passes)]


def test_the_first_error_of_two_is_in_all_messages(ranks: Pools) -> None:
    first, one, two, last = ranks.run(4, _two_raise_differently)
    assert first == last == ["rank 1 failed: KeyError: 'a'"]
    assert one == two == ["done"]


def _one_is_slow() -> list[str]:
    with exchanges("slow") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            for _ in range(2):
                failures.begins()
                exchange()
                time.sleep(0.6 * (dist.get_rank() == 2))
                exchange()

        return [ended(passes)]


def test_a_slow_rank_is_no_failure(ranks: Pools) -> None:
    assert ranks.run(4, _one_is_slow) == [["done"]] * 4


def _backward(failures: Failures, raises: bool) -> None:
    def hook(gradient: torch.Tensor) -> None:
        failures.backward_runs()
        if raises:
            raise ValueError("infinite")

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    with contextlib.suppress(ValueError):
        y.sum().backward()


def _one_backward_raises() -> list[str]:
    with exchanges("backward") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            for step in range(2):
                failures.begins()
                exchange()
                _backward(failures, raises=dist.get_rank() == 0 and step == 1)
            if dist.get_rank() == 0:
                failures.begins()
            exchange()

        return [ended(passes)]


def test_a_backward_that_raised_is_announced_by_the_next_forward(ranks: Pools) -> None:
    for (seen,) in ranks.run(4, _one_backward_raises):
        assert seen.startswith("rank 0 failed: RuntimeError: a backward did not end")


def _reset_after_a_backward_that_raised() -> list[str]:
    """As by FSDP2's ``reset_iter_state``, which waits for what was prefetched."""
    with exchanges("reset") as every:
        failures, exchange = every.failures, every.run

        def passes() -> None:
            failures.begins()
            exchange()
            _backward(failures, raises=dist.get_rank() == 0)
            if dist.get_rank() == 0:
                with failures.waiting():
                    pass  # arrived long ago
                failures.begins()
            exchange()
            exchange()

        return [ended(passes)]


def test_a_backward_that_raised_is_announced_before_what_it_left_is_waited_for(
    ranks: Pools,
) -> None:
    for (seen,) in ranks.run(4, _reset_after_a_backward_that_raised):
        assert seen.startswith("rank 0 failed: RuntimeError: a backward did not end")


def _one_leaves_an_exchange_out() -> list[str]:
    with exchanges("left out") as every:

        def leaves_out(step: int) -> bool:
            return step == 1 and dist.get_rank() == 2  # it caught an error that nobody else had

        return [ended(lambda: on_a_device(every.failures, 3, leaves_out))]


def test_ranks_that_are_not_at_the_same_exchange_all_say_so(ranks: Pools) -> None:
    for (seen,) in ranks.run(4, _one_leaves_an_exchange_out):
        assert "ranks are not at the same exchange" in seen


# An exchange that a failed pass has left in flight ends, or ends in an error, soon


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


def places() -> list[int]:
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
    """Answers of each rank's next exchanges after rank 0's connection has broken in a wait."""
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
