"""The rank that failed first, from what the ranks and agents left."""

import errno
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments.clusters.causes import Board, Exit, NodeResult, Report, is_out_of_memory, outcome
from experiments.clusters.interface import Outcome
from tests.experiments.golden import tables


def report(rank: int, at: int, lost_peer: bool = False, silent: Sequence[int] = ()) -> Report:
    return Report(rank, at, "failed", f"error of {rank}", lost_peer, [*silent])


def code(name: str) -> int:
    return -signal.Signals[name] if name.startswith("SIG") else int(name)


#: By name: exits of ranks of node 0, as code or signal and moment, reports, and the outcome.
CAUSES = tables(__file__)


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_is_who_failed_first(case: str) -> None:
    """Nodes are done, or have ended so; ``kills`` are those by the kernel for memory."""
    of = CAUSES[case]
    exits = {rank: Exit(code(str(how)), at) for rank, (how, at) in of.get("exits", {}).items()}
    results = dict.fromkeys(of.get("done", ()), NodeResult())
    results |= {0: NodeResult(exits)} if exits else {}
    results |= {node: NodeResult(error=error) for node, error in of.get("lost", {}).items()}
    reports = [report(**each) for each in of.get("reports", ())]
    if "oom" in of:
        reports = [Report(of["oom"], 10, "oom", "MemoryError", False, [])]
    kills = of.get("kills", 0)
    assert outcome(results, reports, out_of_memory_kills=kills) == Outcome(*of["outcome"])


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
