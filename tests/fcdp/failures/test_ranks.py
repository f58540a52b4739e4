"""A rank that raises ends the waits of the others, with its error in their messages."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fcdp
from fcdp import failure
from fcdp.engine import engine_of
from fcdp.exchange import any_rank, swap, wait_all
from fcdp.failure import Failures, RankFailed
from tests.fcdp.failures import SOON_S
from tests.fcdp.training import Run, Settings, TinyLM, topology_of
from tests.ranks import Pools, RankPool, on_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("kind", ["receive", "send", "all-reduce"])
@on_ranks(2)
def test_any_wait_over_gloo_can_be_ended(kind: str) -> None:
    """Another thread breaks the group in mid-exchange, on rank 0."""
    began = time.monotonic()
    group = dist.new_group(timeout=timedelta(seconds=150))
    if dist.get_rank() == 0:
        works = {
            "receive": lambda: group.recv([torch.empty(3)], 1, 0),
            "send": lambda: group.send([torch.empty(1 << 26)], 1, 0),
            "all-reduce": lambda: group.allreduce([torch.ones(3)]),
        }
        work = works[kind]()
        thread = threading.Timer(0.1, failure.break_all, [failure.backends_of(group)])
        thread.start()
        with pytest.raises(RuntimeError):
            work.wait()
        thread.join()
    dist.barrier()
    assert time.monotonic() - began < SOON_S


class Exchanges:
    """Exchanges of all ranks, over a group of their own that a failure may break."""

    def __init__(self, name: str) -> None:
        self.rank = dist.get_rank()
        self.group: Any = dist.new_group(timeout=timedelta(seconds=150))
        self.failures = Failures(name, [self.group])

    def issue(self) -> dist.Work:
        """Start one, which is waited for later."""
        with self.failures.exchanges:
            work: dist.Work = self.group.allreduce([torch.ones(3)])
        return work

    def complete(self, work: dist.Work) -> None:
        with self.failures.completing():
            work.wait()

    def run(self) -> None:
        with self.failures.exchanges:
            self.group.allreduce([torch.ones(3)]).wait()

    def begin(self) -> None:
        """Begin a pass, which has an exchange first."""
        self.failures.begins()
        self.run()

    def begin_on_a_device(self, flags: Sequence[bool]) -> None:
        """Begin a pass whose other exchanges are only queued: ranks meet in its flags alone."""
        self.failures.begins()
        assert any_rank([*flags], self._topology) == [*flags]

    @property
    def _topology(self) -> Any:
        if not hasattr(self, "_alone"):
            self._alone = dist.new_group([self.rank], use_local_synchronization=True)
        return SimpleNamespace(
            control_intra=self._alone,
            control_inter=self.group,
            failures=self.failures,
            exchanges=self.failures.exchanges,
        )

    def run_in_pair(self) -> None:
        """Exchange with one other rank; the even ranks are a pair, and the odd ones."""
        if not hasattr(self, "_pair"):
            self._pair: Any = dist.new_group(
                [self.rank % 2, self.rank % 2 + 2],
                timeout=timedelta(seconds=150),
                use_local_synchronization=True,
            )
            self.failures.cover([self._pair])
            self._of_pair = self.failures.part(f"pair {self.rank % 2}", 2)
        with self._of_pair:
            self._pair.allreduce([torch.ones(3)]).wait()

    def backward(self, raises: bool) -> None:
        def hook(gradient: torch.Tensor) -> None:
            self.failures.backward_runs()
            if raises:
                raise ValueError("infinite")

        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(hook)
        with contextlib.suppress(ValueError):
            y.sum().backward()


Act = Callable[[Exchanges], None]


@contextlib.contextmanager
def polling_often() -> Iterator[None]:
    poll, failure.POLL_S = failure.POLL_S, 0.05
    try:
        yield
    finally:
        failure.POLL_S = poll
        dist.barrier()  # of the pool's own group: all have seen what they had to see


def ended(act: Act, exchanges: Exchanges) -> str:
    began = time.monotonic()
    try:
        act(exchanges)
    except RankFailed as error:
        assert time.monotonic() - began < SOON_S
        return str(error)
    return "done"


def acted(acts: Sequence[Act]) -> list[str]:
    """Run the acts one after another; return how each has ended on this rank."""
    with polling_often():
        exchanges = Exchanges(" and ".join(act.__name__ for act in acts))
        return [ended(act, exchanges) for act in acts]


def one_raises_and_is_caught(exchanges: Exchanges) -> None:
    exchanges.begin()
    exchanges.run()
    exchanges.begin()
    if exchanges.rank == 3:
        exchanges.failures.announce(ValueError("no label"))
    else:
        exchanges.run()


def a_pass_that_nobody_else_begins(exchanges: Exchanges) -> None:
    exchanges.begin()
    exchanges.run()


def all_raise_alike(exchanges: Exchanges) -> None:
    for _ in range(2):
        exchanges.begin()
        exchanges.failures.announce(MemoryError("too long a batch"))
        # The others wait for rank 1 in the same pass, for longer than a few polls ...
        time.sleep(0.3 * (exchanges.rank == 1))
        exchanges.run()
        exchanges.failures.begins()
        # ... and in the next.
        time.sleep(0.3 * (exchanges.rank == 2))
        exchanges.run()


def one_is_late_to_raise_alike(exchanges: Exchanges) -> None:
    """The exchange that rank 1 is in ends only after others have announced their errors."""
    exchanges.begin()
    with exchanges.failures.exchanges:
        time.sleep(0.5 * (exchanges.rank == 1))
    exchanges.failures.announce(MemoryError("too long a batch"))
    exchanges.begin()


def one_raises_where_it_leaves_nothing_out(exchanges: Exchanges) -> None:
    """It raises after its last exchange of a pass: nobody can know that it was the last."""
    for _ in range(2):
        exchanges.begin()
        if exchanges.rank == 2:
            exchanges.failures.announce(ValueError("a metric"))
    exchanges.begin()


def all_raise_at_different_exchanges(exchanges: Exchanges) -> None:
    """One would take for its next exchange what another has left out."""
    for flags in ((False, False), (True, False)):
        exchanges.begin_on_a_device(flags)
        if exchanges.rank == 1:
            with exchanges.failures.exchanges:
                pass
        exchanges.failures.announce(MemoryError("too long a batch"))


def two_raise_differently(exchanges: Exchanges) -> None:
    exchanges.begin()
    if exchanges.rank == 1:
        exchanges.failures.announce(KeyError("a"))
    dist.barrier()  # rank 1 has announced before rank 2 does
    if exchanges.rank == 2:
        exchanges.failures.announce(ValueError("b"))
    if exchanges.rank in (0, 3):
        exchanges.run()


def one_is_slow(exchanges: Exchanges) -> None:
    for _ in range(2):
        exchanges.begin()
        time.sleep(0.3 * (exchanges.rank == 2))
        exchanges.run()


def one_backward_raises(exchanges: Exchanges) -> None:
    for step in range(2):
        exchanges.begin()
        exchanges.backward(raises=exchanges.rank == 0 and step == 1)
    if exchanges.rank == 0:
        exchanges.failures.begins()
    exchanges.run()


def one_resets_after_a_backward_that_raised(exchanges: Exchanges) -> None:
    """FSDP2's ``reset_iter_state`` does so, which waits for prefetched gathers."""
    exchanges.begin()
    exchanges.backward(raises=exchanges.rank == 0)
    if exchanges.rank == 0:
        with exchanges.failures.exchanges:
            pass  # arrived long ago
        exchanges.failures.begins()
    exchanges.run()
    exchanges.run()


def one_leaves_an_exchange_out(exchanges: Exchanges) -> None:
    """It caught an error that nobody else had."""
    for step in range(3):
        exchanges.begin_on_a_device((step == 1, False))
        if step != 1 or exchanges.rank != 2:
            with exchanges.failures.exchanges:
                pass


def one_pair_has_more_exchanges(exchanges: Exchanges) -> None:
    """Also before all ranks leave a pass, each pair at an exchange of its own."""
    for more in range(3):
        exchanges.begin_on_a_device([False])
        for _ in range(1 + more * (exchanges.rank % 2)):
            exchanges.run_in_pair()
        if more:
            exchanges.failures.announce(MemoryError("too long a batch"))
    exchanges.begin_on_a_device([False])


def one_fails_before_an_exchange_of_its_pair(exchanges: Exchanges) -> None:
    exchanges.begin()
    exchanges.run_in_pair()
    dist.barrier()  # the other pair has ended what it had to exchange
    if exchanges.rank == 3:
        exchanges.failures.announce(ValueError("no label"))
    try:
        if exchanges.rank == 1:
            exchanges.run_in_pair()
    finally:
        dist.barrier()  # nobody goes on before rank 1 has been told


def one_of_a_pair_fails_before_its_last_exchange(exchanges: Exchanges) -> None:
    exchanges.begin()
    exchanges.run_in_pair()
    with exchanges._of_pair if exchanges.rank == 3 else contextlib.nullcontext():
        pass
    exchanges.failures.announce(MemoryError("too long a batch"))
    exchanges.begin()


# An exchange that a failed pass has left in flight ends, or ends in an error, soon


def _leave_in_flight(exchanges: Exchanges, late: float) -> None:
    exchanges.begin()
    time.sleep(late * (exchanges.rank == 1))
    work = exchanges.issue()
    exchanges.failures.announce(ValueError("no label"))
    exchanges.complete(work)
    exchanges.begin()


def all_fail_with_one_in_flight(exchanges: Exchanges) -> None:
    _leave_in_flight(exchanges, 0)


def all_fail_with_one_in_flight_that_is_late(exchanges: Exchanges) -> None:
    """The others have looked many times whether it can end."""
    _leave_in_flight(exchanges, 0.5)


def one_fails_before_what_the_others_leave_in_flight(exchanges: Exchanges) -> None:
    exchanges.begin()
    if exchanges.rank == 3:
        exchanges.failures.announce(KeyError("batch"))
    dist.barrier()  # rank 3 is the first
    if exchanges.rank != 3:
        work = exchanges.issue()
        exchanges.failures.announce(ValueError("no label"))
        exchanges.complete(work)
    exchanges.begin()


NO_LABEL = "rank 3 failed: ValueError: no label"
APART = "ranks are not at the same exchange"
UNENDED = "rank 0 failed: RuntimeError: a backward did not end"
#: Acts, and the error of each of four ranks at the end of each.
ERRORS: list[tuple[tuple[Act, ...], list[list[str]]]] = [
    (
        (one_raises_and_is_caught, a_pass_that_nobody_else_begins),
        [[NO_LABEL] * 2] * 3 + [["done", NO_LABEL]],
    ),
    ((all_raise_alike,), [["done"]] * 4),
    ((one_is_late_to_raise_alike,), [["done"]] * 4),
    ((one_raises_where_it_leaves_nothing_out,), [["rank 2 failed: ValueError: a metric"]] * 4),
    ((all_raise_at_different_exchanges,), [[APART]] * 4),
    (
        (two_raise_differently,),
        [["rank 1 failed: KeyError: 'a'"], ["done"], ["done"], ["rank 1 failed: KeyError: 'a'"]],
    ),
    ((one_is_slow,), [["done"]] * 4),
    ((one_backward_raises,), [[UNENDED]] * 4),
    ((one_resets_after_a_backward_that_raised,), [[UNENDED]] * 4),
    ((one_leaves_an_exchange_out,), [[APART]] * 4),
    ((one_pair_has_more_exchanges,), [["done"]] * 4),
    (
        (one_fails_before_an_exchange_of_its_pair, Exchanges.run),
        [["done", NO_LABEL], [NO_LABEL] * 2, ["done", NO_LABEL], ["done", NO_LABEL]],
    ),
    ((one_of_a_pair_fails_before_its_last_exchange,), [[APART]] * 4),
    ((all_fail_with_one_in_flight,), [["done"]] * 4),
    ((all_fail_with_one_in_flight_that_is_late,), [["done"]] * 4),
    (
        (one_fails_before_what_the_others_leave_in_flight,),
        [["rank 3 failed: KeyError: 'batch'"]] * 4,
    ),
]


@pytest.mark.always
@pytest.mark.parametrize(("acts", "errors"), ERRORS, ids=[acts[0].__name__ for acts, _ in ERRORS])
def test_errors_of_each_rank(ranks: Pools, acts: tuple[Act, ...], errors: list[list[str]]) -> None:
    for seen, expected in zip(ranks.run(4, acted, acts), errors, strict=True):
        for message, words in zip(seen, expected, strict=True):
            assert words in message


@pytest.mark.parametrize("numel", [33, 1024])
@on_ranks(2)
def test_what_one_rank_alone_left_in_flight_is_not_taken_for_the_next_exchange(numel: int) -> None:
    """On the CPU all exchanges of two ranks share a connection, and match in order."""
    with polling_often():
        exchanges = Exchanges(f"prefetched {numel}")

        def prefetch(exchanges: Exchanges) -> None:
            exchanges.begin_on_a_device([False])
            left: Sequence[dist.Work] = []
            arriving, own = torch.zeros(2, numel, dtype=torch.uint8)
            if exchanges.rank == 1:
                with exchanges.failures.exchanges:
                    left = swap([(0, arriving)], [(0, own)], exchanges.group)
            exchanges.failures.announce(ValueError(f"row {exchanges.rank}"))
            exchanges.failures.begins()
            if left:
                with exchanges.failures.exchanges:
                    wait_all(left)
            any_rank([False], exchanges._topology)

        seen = ended(prefetch, exchanges)
    assert APART in seen, seen


@on_ranks(2)
def test_ranks_may_wait_at_different_times_and_are_at_the_same_place() -> None:
    """Places are equal before and after one of them has waited for what it issued."""
    with polling_often():
        exchanges = Exchanges("places")
        exchanges.failures.begins()
        work = exchanges.issue()
        before = exchanges.failures.exchanges.place
        if exchanges.rank == 0:
            exchanges.complete(work)
        assert exchanges.failures.exchanges.place == before
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, before)
        assert of_ranks == [before, before]


@on_ranks(2)
def test_what_one_rank_runs_alone_is_no_failure_of_a_pass() -> None:
    with polling_often():
        exchanges = Exchanges("alone")
        exchanges.begin()
        if exchanges.rank == 0:
            with pytest.raises(RuntimeError, match="^refused$"), exchanges.failures.alone():
                try:
                    with exchanges.failures.exchanges:
                        raise RuntimeError("refused")
                finally:
                    exchanges.failures.forward_ends()
        exchanges.begin()
        exchanges.run()


@on_ranks(2)
def test_a_connection_that_breaks_is_announced_to_all() -> None:
    """Rank 0's connection has broken in a wait: all learn of it in their next exchanges."""
    with polling_often():
        exchanges = Exchanges("broken")

        def completes(error: Exception) -> None:
            with exchanges.failures.completing():
                raise error

        exchanges.failures.begins()
        with pytest.raises(ValueError, match="no label"):
            completes(ValueError("no label"))
        exchanges.run()  # which is nobody's failure
        if exchanges.rank == 0:
            with pytest.raises(RankFailed):
                completes(RuntimeError("Connection closed by peer"))
        later: Act = lambda _: completes(ValueError("is not reached"))  # noqa: E731
        seen = [ended(Exchanges.run, exchanges), ended(later, exchanges)]
    for message in seen:
        assert "rank 0 could not exchange with another rank" in message, message
        assert "Connection closed by peer" in message, message


# Training


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Four ranks that no other test uses afterwards."""
    pool = RankPool(4)
    yield pool
    pool.close()


def _raise_in(where: str, model: TinyLM) -> Callable[[], None]:
    def hook(module: torch.nn.Module, inputs: object) -> None:
        raise ValueError("no label")

    if where == "forward":
        return model.blocks[1].register_forward_pre_hook(hook).remove
    return model.blocks[0].register_full_backward_pre_hook(hook).remove


def _train(settings: Settings, where: str, failing: tuple[int, ...]) -> tuple[list[str], float]:
    """Five steps, of which the second fails on some ranks, which catch their own error."""
    torch.manual_seed(0)
    failure.POLL_S = 0.2
    done = dist.new_group()  # the pool's own group is among those that a failure breaks
    run = Run(settings)
    seen: list[str] = []
    began = time.monotonic()
    try:
        for step in range(5):
            fails = step == 1 and run.topology.rank in failing
            mend = _raise_in(where, run.model) if fails else lambda: None
            try:
                run.step()
                seen.append("trained")
            except ValueError as error:
                seen.append(str(error))
                run.optimizer.zero_grad()
            finally:
                mend()
    except RankFailed as error:
        seen.append(str(error))
    took = time.monotonic() - began
    dist.barrier(done)
    return seen, took


@pytest.mark.parametrize(("where", "shape"), [("forward", (2, 2)), ("backward", (4, 1))])
def test_one_rank_fails(where: str, shape: tuple[int, int], own_ranks: RankPool) -> None:
    for rank, (seen, took) in enumerate(own_ranks.run(_train, Settings(*shape), where, (3,))):
        expected = "ValueError: no label" if where == "forward" else "a backward did not end"
        assert seen[: -1 if rank != 3 else 2] == ["trained", "no label"][: 2 if rank == 3 else 1]
        assert seen[-1].startswith("rank 3 failed:")
        assert expected in seen[-1]
        assert took < 60


def test_all_ranks_fail_alike(own_ranks: RankPool) -> None:
    for where in ("forward", "backward"):
        for seen, _ in own_ranks.run(_train, Settings(), where, (0, 1, 2, 3)):
            assert seen == ["trained", "no label", "trained", "trained", "trained"]


def _train_over_two_meshes(kind: str) -> str:
    """A pass in which rank 3 fails before a gather of its pair, or leaves one out unseen."""
    failure.POLL_S = 0.2
    done = dist.new_group()
    topology, model = topology_of(2, 2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pairs = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=pairs if kind == "replicas" else pairs["shard"])
    fully_shard(model, mesh=pairs if kind == "replicas" else topology.mesh)
    fcdp.cache_parameters(model, topology)

    def fail(module: nn.Module, inputs: object) -> None:
        raise ValueError("no label")

    if kind == "left out":
        model(torch.ones(1, 4))
        (pair,) = {unit.topology for unit in engine_of(model).units} - {topology}
        with pair.exchanges if dist.get_rank() == 3 else contextlib.nullcontext():
            pass
    elif dist.get_rank() == 3:
        model[0].register_forward_pre_hook(fail, prepend=True)
    try:
        model(torch.ones(1, 4)).sum().backward()
    except (ValueError, RankFailed) as error:
        return str(error)
    except RuntimeError:  # the transport's, of an exchange of FSDP2's own
        with pytest.raises(RankFailed) as told:
            model(torch.ones(1, 4))
        return str(told.value)
    finally:
        dist.barrier(done)
    return "trained"


@pytest.mark.parametrize("kind", ["pairs", "replicas"])
def test_a_rank_that_waits_in_a_group_of_some_ranks_is_told(own_ranks: RankPool, kind: str) -> None:
    """In a gather, and in FSDP2's sum over replicas, of which the other has not failed."""
    told = own_ranks.run(_train_over_two_meshes, kind, timeout_s=SOON_S)
    assert told == ["rank 3 failed: ValueError: no label"] * 3 + ["no label"]


def test_ranks_that_share_a_unit_and_are_not_at_the_same_gather_are_named(
    own_ranks: RankPool,
) -> None:
    """On an accelerator, where the host does not wait for the gather that the other leaves out."""
    told = own_ranks.run(_train_over_two_meshes, "left out", timeout_s=SOON_S)
    assert len({*told}) == 1
    assert told[0].startswith("ranks [1, 3], which share 0, are not at the same exchange")
