"""Which rank failed first, from what the ranks and the nodes' agents left."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from experiments.clusters.agent import NodeResult
from experiments.clusters.board import Report
from experiments.clusters.interface import Outcome


def outcome(
    results: Mapping[int, NodeResult],
    reports: Sequence[Report],
    silent: set[int],
    *,
    out_of_memory_kills: int,
) -> Outcome:
    """How a job ended that was not cut off.

    ``results`` has the nodes whose agents ended by themselves, ``reports`` the exceptions and
    ``silent`` the ranks that ended without one. ``out_of_memory_kills`` is how many processes the
    kernel killed meanwhile because memory ran out.
    """
    exits = {rank: exit_ for result in results.values() for rank, exit_ in result.exits.items()}
    said = {report.rank: report for report in reports}
    silent = silent | (exits.keys() - said.keys())
    if not said and not silent:
        return _of_agents(results)
    # A lost connection is an effect if anything else happened at all.
    moments = {rank: (report.lost_peer, report.moment_ns) for rank, report in said.items()}
    for rank in silent:
        moments[rank] = (False, _end_of_silent(rank, reports, exits))
    first = min(moments, key=lambda rank: moments[rank])
    if first in said:
        return Outcome(said[first].state, first, said[first].error)
    code = exits[first][0] if first in exits else None
    # Nobody of ours sends SIGKILL before the first failure.
    if code == -signal.SIGKILL and out_of_memory_kills > 0:
        return Outcome("oom", first, "killed by signal SIGKILL: the kernel ran out of memory")
    return Outcome("failed", first, describe_exit(code))


def _of_agents(results: Mapping[int, NodeResult]) -> Outcome:
    for node, result in sorted(results.items()):
        if result.error is not None:
            return Outcome("failed", None, f"the agent of node {node} failed:\n{result.error}")
    return Outcome("ok")


def _end_of_silent(
    rank: int, reports: Sequence[Report], exits: Mapping[int, tuple[int, int]]
) -> int:
    """A moment, in ns, before every report that knows of the end of a rank without a report."""
    known = [report.moment_ns - 1 for report in reports if rank in report.silent_before]
    if rank in exits:
        known.append(exits[rank][1])
    # Seen by the parent only, which looks after everybody else.
    return min(known, default=2**63)


def describe_exit(code: int | None) -> str:
    """In words: an exit code as ``multiprocessing`` gives it, negative for a signal."""
    if code is None:
        return "ended before its function returned, with an exit code that nobody has seen"
    if code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its function returned"
