"""What a rank that waits finds on the board, and when it aborts its collectives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fcdp import failure
from fcdp.failure import Board, Failures, RankFailed
from tests.fcdp.failures.made_up import Backend, Group, exchange, look_often, over_nccl


def test_on_cuda_a_rank_that_runs_ahead_aborts_and_the_next_exchange_raises(
    playing: Callable[[int], None],
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
    assert backend.calls == ["start", "abort", "end"]
    look_often(here)
    assert backend.calls == ["start", "abort", "end"], "aborted once"
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        exchange(here, 1)
    with pytest.raises(RankFailed, match="rank 1 failed: ValueError: no label"):
        here.begins()


def test_on_cuda_ranks_that_all_raise_alike_abort_nothing(playing: Callable[[int], None]) -> None:
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


def test_an_uncaught_error_ends_whoever_waits_however_far_it_is(
    playing: Callable[[int], None],
) -> None:
    (here, backend), (there, _) = over_nccl(), over_nccl()
    there.begins()
    playing(1)
    there.announce(ValueError("no label"), final=True)
    for _ in range(5):
        here.begins()
    look_often(here)
    assert backend.calls == ["start", "abort", "end"]


def test_nothing_is_asked_while_nothing_is_waited_for(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Board, "read", lambda self, key: asked.append(key))
    group: Any = Group(Backend("gloo"))
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


def test_a_store_that_stays_lost_ends_a_wait_and_nothing_else(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(self: Board, key: str) -> None:
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(Board, "read", lost)
    failures, backend = over_nccl()
    failures.begins()
    for _ in range(failure.PATIENCE):
        look_often(failures)
    assert backend.calls == [], "training has ended, perhaps, and with it the store"
    with failures.waiting():
        look_often(failures)
    assert backend.calls == ["start", "abort", "end"]
    with pytest.raises(RankFailed, match=r"rank 0 was lost\? DistNetworkError: Broken pipe"):
        failures.begins()


def test_ranks_that_stay_away_end_a_roll_call(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "ROLL_CALL_S", 0.1)
    failures, _ = over_nccl()
    failures.begins()
    failures.announce(ValueError("no label"))
    with pytest.raises(RankFailed, match="some ranks did not leave the pass that failed on rank 0"):
        failures.begins()


def test_a_store_of_which_nothing_can_be_asked_changes_nothing(
    playing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeStore(dist.Store):
        """As the ``fake`` backend has it."""

    monkeypatch.setattr(failure, "_get_default_store", FakeStore)
    failures, backend = over_nccl()
    for _ in range(2):
        failures.begins()
        failures.announce(ValueError("no label"))
        exchange(failures, 1)
        look_often(failures)
    assert backend.calls == []
