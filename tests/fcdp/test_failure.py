"""A rank that fails ends the waits of the others, with its error in their messages."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fcdp import board, breaking, failure, watcher
from fcdp.board import Announcement, Board
from fcdp.exchange import any_rank
from fcdp.failure import Failures, RankFailed
from tests.ranks import Pools

#: Far below the groups' time-out, far above what the machine needs under load.
SOON_S = 100.0


# --- four ranks of one pool


@contextlib.contextmanager
def _failures(name: str) -> Iterator[tuple[Failures, Callable[[], None]]]:
    """Failures over a group of their own, and an exchange of all ranks over it."""
    group = dist.new_group(timeout=timedelta(seconds=150))
    failures = Failures(name, [group])
    poll, watcher.POLL_S = watcher.POLL_S, 0.1

    def exchange() -> None:
        with failures.waiting():
            group.allreduce([torch.ones(3)]).wait()

    try:
        yield failures, exchange
    finally:
        watcher.POLL_S = poll
        dist.barrier()  # of the pool's own group: all have seen what they had to see


def _ended(work: Callable[[], None]) -> str:
    """What ends ``work`` in another's stead, if it ends soon."""
    began = time.monotonic()
    try:
        work()
    except RankFailed as error:
        assert time.monotonic() - began < SOON_S
        return str(error)
    return "done"


def _one_raises_and_is_caught() -> list[str]:
    with _failures("caught") as (failures, exchange):

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
        return [_ended(passes), _ended(lambda: one_pass(fails=False))]


def test_a_rank_that_raises_and_goes_on_ends_the_waits_of_the_others(ranks: Pools) -> None:
    *others, failed = ranks.run(4, _one_raises_and_is_caught)
    for seen in others:
        assert seen == ["rank 3 failed: ValueError: no label"] * 2
    assert failed == ["done", "rank 3 failed: ValueError: no label"]


def _all_raise_alike() -> list[str]:
    with _failures("alike") as (failures, exchange):

        def passes() -> None:
            for _ in range(3):
                failures.begins()
                exchange()
                failures.announce(MemoryError("too long a batch"))
                # The others wait for rank 1 in the same pass, for longer than a few polls ...
                time.sleep(dist.get_rank() == 1)
                exchange()
                failures.begins()
                # ... and in the next.
                time.sleep(dist.get_rank() == 2)
                exchange()

        return [_ended(passes)]


def test_ranks_that_all_raise_alike_go_on(ranks: Pools) -> None:
    assert ranks.run(4, _all_raise_alike) == [["done"]] * 4


def _one_is_late_to_raise_alike() -> list[str]:
    with _failures("late") as (failures, exchange):

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

        return [_ended(passes)]


def test_a_rank_that_is_about_to_raise_alike_is_left_alone(ranks: Pools) -> None:
    assert ranks.run(4, _one_is_late_to_raise_alike) == [["done"]] * 4


def _one_raises_after_the_last_exchange() -> list[str]:
    with _failures("after") as (failures, exchange):

        def passes() -> None:
            for _ in range(2):
                failures.begins()
                exchange()
                if dist.get_rank() == 2:
                    failures.announce(ValueError("a metric"))
            failures.begins()
            exchange()

        return [_ended(passes)]


def test_a_rank_that_has_left_nothing_out_may_go_on(ranks: Pools) -> None:
    assert ranks.run(4, _one_raises_after_the_last_exchange) == [["done"]] * 4


def _two_raise_differently() -> list[str]:
    with _failures("two") as (failures, exchange):
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

        return [_ended(passes)]


def test_the_first_error_of_two_is_in_all_messages(ranks: Pools) -> None:
    first, one, two, last = ranks.run(4, _two_raise_differently)
    assert first == last == ["rank 1 failed: KeyError: 'a'"]
    assert one == two == ["done"]


def _one_is_slow() -> list[str]:
    with _failures("slow") as (failures, exchange):

        def passes() -> None:
            for _ in range(2):
                failures.begins()
                exchange()
                time.sleep(1.5 * (dist.get_rank() == 2))
                exchange()

        return [_ended(passes)]


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
    with _failures("backward") as (failures, exchange):

        def passes() -> None:
            for step in range(2):
                failures.begins()
                exchange()
                _backward(failures, raises=dist.get_rank() == 0 and step == 1)
            if dist.get_rank() == 0:
                failures.begins()
            exchange()

        return [_ended(passes)]


def test_a_backward_that_raised_is_announced_by_the_next_forward(ranks: Pools) -> None:
    for (seen,) in ranks.run(4, _one_backward_raises):
        assert seen.startswith("rank 0 failed: RuntimeError: a backward did not end")


def _reset_after_a_backward_that_raised() -> list[str]:
    """As by FSDP2's ``reset_iter_state``, which waits for what was prefetched."""
    with _failures("reset") as (failures, exchange):

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

        return [_ended(passes)]


def test_a_backward_that_raised_is_announced_before_what_it_left_is_waited_for(
    ranks: Pools,
) -> None:
    for (seen,) in ranks.run(4, _reset_after_a_backward_that_raised):
        assert seen.startswith("rank 0 failed: RuntimeError: a backward did not end")


def _one_leaves_an_exchange_out() -> list[str]:
    """On a device nobody waits on the host, and the ranks meet again in the flags of a pass."""
    with _failures("left out") as (failures, _):
        group = dist.new_group(timeout=timedelta(seconds=150))
        topology: Any = SimpleNamespace(
            control_intra=dist.new_group([dist.get_rank()], use_local_synchronization=True),
            control_inter=group,
            failures=failures,
        )

        def passes() -> None:
            for step in range(3):
                failures.begins()
                assert any_rank([step == 1, False], topology) == [step == 1, False]
                if step == 1 and dist.get_rank() == 2:
                    continue  # it caught an error that nobody else had
                with failures.waiting():
                    pass  # queued

        return [_ended(passes)]


def test_ranks_that_are_not_at_the_same_exchange_all_say_so(ranks: Pools) -> None:
    for (seen,) in ranks.run(4, _one_leaves_an_exchange_out):
        assert "ranks are not at the same exchange" in seen


def _break(kind: str) -> str:
    """Break a group in mid-exchange from another thread, on rank 0; what rank 0 then sees."""
    group = dist.new_group(timeout=timedelta(seconds=150))
    try:
        if dist.get_rank() != 0:
            return "done"
        works = {
            "receive": lambda: group.recv([torch.empty(3)], 1, 0),
            "send": lambda: group.send([torch.empty(1 << 26)], 1, 0),
            "all-reduce": lambda: group.allreduce([torch.ones(3)]),
        }
        work = works[kind]()
        thread = threading.Timer(0.3, breaking.break_all, [breaking.backends_of(group)])
        thread.start()
        try:
            work.wait()
        except RuntimeError:
            return "broken"
        finally:
            thread.join()
        return "done"
    finally:
        dist.barrier()


@pytest.mark.parametrize("kind", ["receive", "send", "all-reduce"])
def test_any_wait_over_gloo_can_be_ended(kind: str, ranks: Pools) -> None:
    began = time.monotonic()
    assert ranks.run(2, _break, kind) == ["broken", "done"]
    assert time.monotonic() - began < SOON_S


# --- processes that end


def _run_job(failing: int, how: str) -> list[tuple[int, str]]:
    """Exit status and error output of three ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    arguments = ["3", str(port), str(failing), how]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.fcdp.failing_rank", str(rank), *arguments],
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=4 * SOON_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("failing", [0, 2], ids=["serves-the-store", "another"])
def test_an_uncaught_error_is_in_the_messages_of_all_ranks(failing: int) -> None:
    for rank, (status, output) in enumerate(_run_job(failing, "raises")):
        assert status == 1, output
        last = output.strip().splitlines()[-1].removeprefix(f"[rank{rank}]: ")
        if rank == failing:
            assert last == "ValueError: row 17 has no label"
        else:
            expected = f"rank {failing} failed: ValueError: row 17 has no label"
            assert last == f"fcdp.failure.RankFailed: {expected}"
            # The transport's error is its cause.
            assert "was the direct cause of the following exception" in output


@pytest.mark.ranks
@pytest.mark.parametrize("failing", [0, 2], ids=["serves-the-store", "another"])
def test_a_killed_rank_ends_the_others(failing: int) -> None:
    for rank, (status, output) in enumerate(_run_job(failing, "is-killed")):
        if rank == failing:
            assert status == -signal.SIGKILL
        else:
            assert status == 1, output
            assert "fcdp.failure.RankFailed: rank" in output
            assert "no rank has reported an error: one was killed" in output
            assert ("rank 0 was lost?" in output) == (failing == 0)


# --- one process that plays all parts


class _Backend:
    """A backend that records calls, and carries nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.calls.append("abort")

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


class _Group:
    """A group of as many ranks as asked for."""

    def __init__(self, backend: _Backend, size: int = 2) -> None:
        self._backend = backend
        self._size = size
        self._device_types = [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> _Backend:
        return self._backend

    def size(self) -> int:
        return self._size


@pytest.fixture
def playing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Become another rank of a job whose store lives in this process; nothing looks by itself."""
    store = dist.HashStore()
    monkeypatch.setattr(board, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure, "watch", lambda failures: None)
    monkeypatch.setattr(failure, "PAUSE_S", 0.01)

    def become(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    become(0)
    return become


def _over_nccl(name: str = "a", size: int = 2) -> tuple[Failures, _Backend]:
    backend = _Backend("nccl")
    group: Any = _Group(backend, size)
    return Failures(name, [group]), backend


def _look_often(failures: Failures) -> None:
    for _ in range(2 * failure.IDLE_POLLS):
        failures.look()


def _exchange(failures: Failures, times: int) -> None:
    for _ in range(times):
        with failures.waiting():
            pass


def test_on_cuda_a_rank_that_runs_ahead_aborts_and_the_next_exchange_raises(
    playing: Callable[[int], None],
) -> None:
    (here, backend), (there, _) = _over_nccl(), _over_nccl()
    for failures in (here, there):
        failures.begins()
        _exchange(failures, 2)
    playing(1)
    there.announce(ValueError("no label"))
    playing(0)
    _look_often(here)
    assert backend.calls == [], "nothing is missing so far"
    _exchange(here, 1)
    here.begins()  # the host is a pass ahead of the device
    _look_often(here)
    assert backend.calls == ["start", "abort", "end"]
    _look_often(here)
    assert backend.calls == ["start", "abort", "end"], "aborted once"
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        _exchange(here, 1)
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        here.begins()


def test_on_cuda_ranks_that_all_raise_alike_abort_nothing(
    playing: Callable[[int], None],
) -> None:
    (here, backend), (there, other) = _over_nccl(), _over_nccl()
    for _ in range(2):
        # Together: after a failure the first waits for the second.
        threads = [threading.Thread(target=failures.begins) for failures in (here, there)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failures in (here, there):
            _exchange(failures, 3)
            failures.announce(MemoryError("too long a batch"))
            _exchange(failures, 1)  # of what follows in the same pass
            _look_often(here)
            _look_often(there)
    assert backend.calls == other.calls == []


def test_an_uncaught_error_ends_whoever_waits_however_far_it_is(
    playing: Callable[[int], None],
) -> None:
    (here, backend), (there, _) = _over_nccl(), _over_nccl()
    there.begins()
    playing(1)
    there.announce(ValueError("no label"), final=True)
    for _ in range(5):
        here.begins()
    _look_often(here)
    assert backend.calls == ["start", "abort", "end"]


def test_nothing_is_asked_while_nothing_is_waited_for(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Board, "read", lambda self, key: asked.append(key))
    group: Any = _Group(_Backend("gloo"))
    failures = Failures("quiet", [group])
    for _ in range(3):
        failures.begins()
        for _ in range(10):
            with failures.waiting():
                failures.look()
            failures.look()
    assert asked == []
    with failures.waiting():
        failures.look()
        assert asked == [], "this wait may be short"
        failures.look()
    assert asked


def test_many_ranks_look_less_often(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Board, "read", lambda self, key: asked.append(key))
    failures, _ = _over_nccl(size=2 * failure.RANKS_PER_POLL)
    failures.begins()
    with failures.waiting():
        for _ in range(3 * 5):
            failures.look()
    assert asked.count("final") <= 5


def test_a_store_that_stays_lost_ends_a_wait_and_nothing_else(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Board, key: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(Board, "read", lost)
    failures, backend = _over_nccl()
    failures.begins()
    for _ in range(failure.PATIENCE):
        _look_often(failures)
    assert backend.calls == [], "training has ended, perhaps, and with it the store"
    with failures.waiting():
        _look_often(failures)
    assert backend.calls == ["start", "abort", "end"]
    with pytest.raises(RankFailed, match=r"rank 0 was lost\? DistNetworkError: Broken pipe"):
        failures.begins()


def test_ranks_that_stay_away_end_a_roll_call(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "ROLL_CALL_S", 0.1)
    failures, _ = _over_nccl()
    failures.begins()
    failures.announce(ValueError("no label"))
    with pytest.raises(RankFailed, match="some ranks did not leave pass 1, which failed"):
        failures.begins()


def test_a_store_of_which_nothing_can_be_asked_changes_nothing(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeStore(dist.Store):
        """As the ``fake`` backend has it."""

    monkeypatch.setattr(board, "_get_default_store", FakeStore)
    failures, backend = _over_nccl()
    for _ in range(2):
        failures.begins()
        failures.announce(ValueError("no label"))
        _exchange(failures, 1)
        _look_often(failures)
    assert backend.calls == []


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative\n  rows")
        return x


def _announced(failures: Failures, x: torch.Tensor) -> Announcement | None:
    """What a forward of ``x`` announces in the first pass."""
    module = _Fails()
    module.register_forward_pre_hook(lambda module, args: failures.begins())
    module.register_forward_hook(
        lambda module, args, output: failures.forward_ends(), always_call=True
    )
    with contextlib.suppress(ValueError):
        module(x)
    return Board("hook").read("1")


def test_a_forward_that_raises_announces_its_error(playing: Callable[[int], None]) -> None:
    failures, _ = _over_nccl("hook")
    assert _announced(failures, -torch.ones(2)) == ("rank 0 failed: ValueError: negative rows", 0)


def test_an_error_that_the_caller_is_handling_is_not_the_forwards(
    playing: Callable[[int], None],
) -> None:
    failures, _ = _over_nccl("hook")
    try:
        raise KeyError("batch")
    except KeyError:
        assert _announced(failures, torch.ones(2)) is None


def test_only_the_transports_errors_are_explained(playing: Callable[[int], None]) -> None:
    failures, backend = _over_nccl()
    for error in (ValueError("a"), torch.OutOfMemoryError("b"), KeyboardInterrupt()):
        with pytest.raises(type(error)), failures.waiting():
            raise error
    assert backend.calls == []
    with (
        pytest.raises(RankFailed, match="one was killed .* RuntimeError: Connection") as caught,
        failures.waiting(),
    ):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value.__cause__) == "Connection closed by peer"
    assert "abort" in backend.calls, "for whoever waits for this rank"


def test_a_message_stays_short(playing: Callable[[int], None]) -> None:
    failures, _ = _over_nccl("long")
    failures.begins()
    failures.announce(ValueError("x" * 10_000))
    announced = Board("long").read("1")
    assert announced is not None
    assert len(announced.text) < failure.TEXT_LIMIT + 20


def test_the_first_text_and_the_fewest_exchanges_stay(playing: Callable[[int], None]) -> None:
    shared = Board("kept")
    assert shared.put("1", Announcement("first", 5)) == "first"
    assert shared.put("1", Announcement("second", 3)) == "first"
    assert shared.put("1", Announcement("third", 4)) == "first"
    assert shared.read("1") == ("first", 3)
    assert shared.read("2") is None


def test_the_thread_ends_after_the_last_engine(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "watch", watcher.watch)
    monkeypatch.setattr(watcher, "POLL_S", 0.05)
    hook = sys.excepthook
    try:
        failures, _ = _over_nccl()
        failures.begins()
        thread = watcher._thread
        assert thread is not None
        del failures
        gc.collect()
        thread.join(timeout=SOON_S)
        assert not thread.is_alive()
        failures, _ = _over_nccl()
        failures.begins()
        assert watcher._thread is not None, "a later engine has one again"
        watcher._thread.join(timeout=0.2)
        assert watcher._thread.is_alive()
    finally:
        sys.excepthook = hook
