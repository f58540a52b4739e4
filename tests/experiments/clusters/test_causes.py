"""The rank that failed first, from what the ranks and agents left."""

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


KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
LOST_AGENT = {1: NodeResult(error="the agent of node 1 was killed")}
OUTCOMES: dict[str, tuple[dict[int, NodeResult], list[Report], int, Outcome]] = {
    "all nodes are done": ({0: NodeResult(), 1: NodeResult()}, [], 0, Outcome("ok")),
    "the earliest exception is the cause": (
        {}, [report(0, 20), report(3, 10)], 0, Outcome("failed", 3, "error of 3"),
    ),
    "an exception says that memory was lacking": (
        {}, [Report(2, 10, "oom", "MemoryError", False, [])], 0, Outcome("oom", 2, "MemoryError"),
    ),
    "a lost connection is an effect of any other exception": (
        {}, [report(0, 10, lost_peer=True), report(3, 20)], 0, Outcome("failed", 3, "error of 3"),
    ),
    "a silent end precedes the exceptions that know of it": (
        failed(rank0=(1, 30), rank1=(1, 30), rank2=(KILLED, 30)),
        [report(0, 10, silent_before=(2,)), report(1, 11, lost_peer=True)],
        0, Outcome("failed", 2, "killed by signal SIGKILL"),
    ),
    "a silent end that followed an exception is an effect": (
        failed(rank0=(1, 20), rank1=(ABORTED, 20)), [report(0, 10)],
        0, Outcome("failed", 0, "error of 0"),
    ),
    "the kernel says that it killed for memory": (
        failed(rank1=(KILLED, 1)), [],
        1, Outcome("oom", 1, "killed by signal SIGKILL: the kernel ran out of memory"),
    ),
    "it says nothing": (
        failed(rank1=(KILLED, 1)), [], 0, Outcome("failed", 1, "killed by signal SIGKILL"),
    ),
    "it killed another": (
        failed(rank1=(ABORTED, 1)), [], 1, Outcome("failed", 1, "killed by signal SIGABRT"),
    ),
    "an agent that could not launch its ranks": (
        {0: NodeResult(), **LOST_AGENT}, [], 0, Outcome("failed", None, LOST_AGENT[1].error),
    ),
    "a rank that died with its agent": (
        LOST_AGENT, [report(0, 10, lost_peer=True, silent_before=(2,))],
        0, Outcome("failed", 2, f"ended before its function returned; {LOST_AGENT[1].error}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTCOMES)
def test_the_cause_is_who_failed_first(case: str) -> None:
    results, reports, kills, expected = OUTCOMES[case]
    assert outcome(results, reports, out_of_memory_kills=kills) == expected


def test_out_of_memory_is_recognised_and_no_other_error() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    of_the_host, of_cuda = raised.value, torch.OutOfMemoryError("CUDA out of memory")
    effect = RuntimeError("step failed")
    effect.__cause__ = MemoryError()
    for error in (of_the_host, of_cuda, OSError(errno.ENOMEM, ""), MemoryError(), effect):
        assert is_out_of_memory(error)
    for error in (RuntimeError("out of memory?"), OSError(errno.ENOENT, "")):
        assert not is_out_of_memory(error)


def test_a_rank_that_lives_has_finished_or_has_reported_is_not_silent(tmp_path: Path) -> None:
    board = Board(tmp_path, range(3))
    assert board.silent() == set()
    with board.alive(0):
        pass
    board.report(1, MemoryError("the cause"))
    assert board.silent() == set()
    (reported,) = board.reports()
    assert (reported.rank, reported.state) == (1, "oom")
    assert reported.error == "MemoryError: the cause\n"
