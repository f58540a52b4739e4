"""The rank that failed first, from what the ranks and agents left."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest
import torch

from experiments.clusters.causes import Board, Exit, NodeResult, Report, is_out_of_memory, outcome
from experiments.clusters.interface import Outcome


def report(
    rank: int, moment: int, *, lost_peer: bool = False, silent_before: tuple[int, ...] = ()
) -> Report:
    return Report(rank, moment, "failed", f"error of {rank}", lost_peer, list(silent_before))


def failed(**exits: tuple[int, int]) -> dict[int, NodeResult]:
    """Node 0's result, with exits as ``rank0=(code, moment)``."""
    return {0: NodeResult({int(rank[4:]): Exit(*exit_) for rank, exit_ in exits.items()})}


def test_all_nodes_done_is_ok() -> None:
    done = {0: NodeResult(), 1: NodeResult()}
    assert outcome(done, [], out_of_memory_kills=0) == Outcome("ok")


def test_the_earliest_exception_is_the_cause() -> None:
    ended = outcome({}, [report(0, 20), report(3, 10)], out_of_memory_kills=0)
    assert ended == Outcome("failed", 3, "error of 3")


def test_a_lost_connection_is_an_effect_of_any_other_exception() -> None:
    reports = [report(0, 10, lost_peer=True), report(3, 20)]
    assert outcome({}, reports, out_of_memory_kills=0).rank == 3


def test_a_silent_end_precedes_the_exceptions_that_know_of_it() -> None:
    reports = [report(0, 10, silent_before=(2,)), report(1, 11, lost_peer=True)]
    results = failed(rank0=(1, 30), rank1=(1, 30), rank2=(-signal.SIGKILL, 30))
    ended = outcome(results, reports, out_of_memory_kills=0)
    assert ended == Outcome("failed", 2, "killed by signal SIGKILL")


def test_a_silent_end_that_followed_an_exception_is_an_effect() -> None:
    reports = [report(0, 10)]
    results = failed(rank0=(1, 20), rank1=(-signal.SIGABRT, 20))
    assert outcome(results, reports, out_of_memory_kills=0).rank == 0


def test_sigkill_is_out_of_memory_only_if_the_kernel_says_so() -> None:
    killed, aborted = failed(rank1=(-signal.SIGKILL, 1)), failed(rank1=(-signal.SIGABRT, 1))
    assert outcome(killed, [], out_of_memory_kills=1).state == "oom"
    assert outcome(killed, [], out_of_memory_kills=0).state == "failed"
    assert outcome(aborted, [], out_of_memory_kills=1).state == "failed"


def test_an_agent_that_could_not_launch_its_ranks_is_named() -> None:
    results = {0: NodeResult(), 1: NodeResult(error="the agent of node 1 failed")}
    ended = outcome(results, [], out_of_memory_kills=0)
    assert ended == Outcome("failed", None, "the agent of node 1 failed")


def test_a_rank_that_died_with_its_agent_is_named_with_the_agent() -> None:
    results = {1: NodeResult(error="the agent of node 1 was killed")}
    reports = [report(0, 10, lost_peer=True, silent_before=(2,))]
    ended = outcome(results, reports, out_of_memory_kills=0)
    assert ended.rank == 2
    assert ended.error is not None
    assert "the agent of node 1 was killed" in ended.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)
    effect = RuntimeError("step failed")
    effect.__cause__ = error
    assert is_out_of_memory(effect)


def test_out_of_host_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize("error", [RuntimeError("out of memory?"), OSError(errno.ENOENT, "")])
def test_other_errors_are_not_taken_for_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_a_rank_that_lives_has_finished_or_has_reported_is_not_silent(tmp_path: Path) -> None:
    board = Board(tmp_path, range(3))
    board.create()
    assert board.silent() == set()
    with board.alive(0):
        pass
    board.report(1, ValueError("the cause"))
    assert board.silent() == set()
    assert [(each.rank, each.error) for each in board.reports()] == [(1, "ValueError: the cause\n")]
