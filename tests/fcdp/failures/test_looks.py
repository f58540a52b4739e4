"""Announcements of an error: their words, what a waiting rank finds, and when it aborts."""

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fcdp import failure
from fcdp.failure import Announcement, Board, Failures, RankFailed


class Backend:
    """A backend that records calls, and carries nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls: list[str] = []

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.calls.append("abort")


class Group:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._device_types = [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Backend:
        return self._backend

    def size(self) -> int:
        return 2


def over_nccl(name: str = "a") -> tuple[Failures, Backend]:
    backend = Backend("nccl")
    group: Any = Group(backend)
    return Failures(name, [group]), backend


def look_often(failures: Failures) -> None:
    """Look until the store must have been asked."""
    for _ in range(2 * failure.IDLE_POLLS):
        failures.look()


def exchange(failures: Failures, times: int) -> None:
    """Wait for as many exchanges, each of which has arrived."""
    for _ in range(times):
        with failures.exchanges:
            pass


#: Becomes the rank of this number.
Become = Callable[[int], None]


@pytest.fixture(autouse=True)
def playing(monkeypatch: pytest.MonkeyPatch) -> Become:
    """One process that plays all ranks of a job, whose store it has; nothing looks by itself."""
    store = dist.HashStore()
    monkeypatch.setattr(failure, "_get_default_store", lambda: store)
    monkeypatch.setattr(failure, "watch", lambda failures: None)
    monkeypatch.setattr(failure, "PAUSE_S", 0.01)

    def become(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    become(0)
    return become


def test_on_cuda_a_rank_that_runs_ahead_aborts_and_the_next_exchange_raises(
    playing: Become,
) -> None:
    (here, backend), (there, _) = over_nccl(), over_nccl()
    for failures in (here, there):
        failures.begins()
        exchange(failures, 2)
    playing(1)
    there.announce(ValueError("no label"))
    playing(0)
    look_often(here)
    assert backend.calls == [], "nothing is missing so far"
    exchange(here, 1)
    here.begins()  # the host is a pass ahead of the device
    look_often(here)
    assert backend.calls == ["abort"]
    look_often(here)
    assert backend.calls == ["abort"], "aborted once"
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        exchange(here, 1)
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        here.begins()


def test_on_cuda_all_are_aborted_at_once_and_none_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each abort waits for the device, which another communicator's exchange keeps busy."""
    monkeypatch.setattr(failure, "LINGER_S", 1.0)
    others, reached, never = threading.Barrier(3), list[int](), threading.Event()
    aborts = [lambda: never.wait(60), *[lambda: reached.append(others.wait(0.5))] * 3]
    failure.break_all([SimpleNamespace(name=lambda: "nccl", abort=abort) for abort in aborts])
    assert sorted(reached) == [0, 1, 2]
    never.set()


def test_on_cuda_ranks_that_all_raise_alike_abort_nothing() -> None:
    (here, backend), (there, other) = over_nccl(), over_nccl()
    for _ in range(2):
        # Together: after a failure the first waits for the second.
        threads = [threading.Thread(target=failures.begins) for failures in (here, there)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failures in (here, there):
            exchange(failures, 3)
            failures.announce(MemoryError("too long a batch"))
            exchange(failures, 1)  # of what follows in the same pass
            look_often(here)
            look_often(there)
    assert backend.calls == other.calls == []


def test_an_uncaught_error_ends_whoever_waits_however_far_it_is(playing: Become) -> None:
    (here, backend), (there, _) = over_nccl(), over_nccl()
    there.begins()
    playing(1)
    there.announce(ValueError("no label"), final=True)
    for _ in range(5):
        here.begins()
    look_often(here)
    assert backend.calls == ["abort"]


def test_nothing_is_asked_while_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Board, "read", lambda self, key: asked.append(key))
    group: Any = Group(Backend("gloo"))
    failures = Failures("quiet", [group])
    for _ in range(3):
        failures.begins()
        for _ in range(10):
            with failures.exchanges:
                failures.look()
            failures.look()
    assert asked == []
    with failures.exchanges:
        failures.look()
        assert asked == [], "this wait may be short"
        failures.look()
    assert asked


def test_a_store_that_stays_lost_ends_a_wait_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(self: Board, key: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(Board, "read", lost)
    failures, backend = over_nccl()
    failures.begins()
    for _ in range(failure.PATIENCE):
        look_often(failures)
    assert backend.calls == [], "training has ended, perhaps, and with it the store"
    with failures.exchanges:
        look_often(failures)
    assert backend.calls == ["abort"]
    with pytest.raises(RankFailed, match=r"rank 0 was lost\? DistNetworkError: Broken pipe"):
        failures.begins()


def test_ranks_that_stay_away_end_a_roll_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "ROLL_CALL_S", 0.1)
    failures, _ = over_nccl()
    failures.begins()
    failures.announce(ValueError("no label"))
    with pytest.raises(RankFailed, match="some ranks did not leave the pass that failed on rank 0"):
        failures.begins()


def test_a_store_of_which_nothing_can_be_asked_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeStore(dist.Store):
        """A store like that of the ``fake`` backend."""

    monkeypatch.setattr(failure, "_get_default_store", FakeStore)
    failures, backend = over_nccl()
    for _ in range(2):
        failures.begins()
        failures.announce(ValueError("no label"))
        exchange(failures, 1)
        look_often(failures)
    assert backend.calls == []


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() < 0:
            raise ValueError("negative\n  rows")
        return x


def _announced(failures: Failures, x: torch.Tensor) -> Announcement | None:
    module = _Fails()

    def begin(module: torch.nn.Module, args: object) -> None:
        failures.begins()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(
        lambda module, args, output: failures.forward_ends(), always_call=True
    )
    with contextlib.suppress(ValueError):
        module(x)
    return Board("hook").read("0")


def test_a_forward_that_raises_announces_its_error() -> None:
    failures, _ = over_nccl("hook")
    announced = _announced(failures, -torch.ones(2))
    assert announced == ("rank 0 failed: ValueError: negative rows", {"": 0})


def test_an_error_that_the_caller_is_handling_is_not_the_forwards() -> None:
    failures, _ = over_nccl("hook")
    try:
        raise KeyError("batch")
    except KeyError:
        assert _announced(failures, torch.ones(2)) is None


def test_only_the_transports_errors_are_explained() -> None:
    failures, backend = over_nccl()
    for error in (ValueError("a"), torch.OutOfMemoryError("b"), KeyboardInterrupt()):
        with pytest.raises(type(error)), failures.exchanges:
            raise error
    assert backend.calls == []
    with (
        pytest.raises(RankFailed, match="one was killed .* RuntimeError: Connection") as caught,
        failures.exchanges,
    ):
        raise RuntimeError("Connection closed by peer")
    assert str(caught.value.__cause__) == "Connection closed by peer"
    assert "abort" in backend.calls, "for whoever waits for this rank"


def test_a_message_stays_short() -> None:
    failures, _ = over_nccl("long")
    failures.begins()
    failures.announce(ValueError("x" * 10_000))
    assert len(Board("long").read("0").text) < failure.TEXT_LIMIT + 20


def test_the_first_text_and_the_fewest_exchanges_stay() -> None:
    shared = Board("kept")
    assert shared.put("1", Announcement("first", {"": 5, "a": 2})) == "first"
    assert shared.put("1", Announcement("second", {"": 3, "b": 7})) == "first"
    assert shared.put("1", Announcement("third", {"": 4, "a": 1})) == "first"
    assert shared.read("1") == ("first", {"": 3, "a": 1, "b": 7})
    assert shared.read("2") is None
