"""Which rank failed first, from what the ranks and the nodes' agents left."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from experiments.clusters.agent import Exit, NodeResult
from experiments.clusters.board import Report
from experiments.clusters.interface import Outcome


def outcome(
    results: Mapping[int, NodeResult], reports: Sequence[Report], *, out_of_memory_kills: int
) -> Outcome:
    """How a job ended whose time was not over.

    ``results`` has, by node, what the agents said, and ``reports`` the exceptions that ended
    ranks. ``out_of_memory_kills`` is how many processes the kernel killed meanwhile because
    memory ran out.
    """
    exits = {rank: exit_ for result in results.values() for rank, exit_ in result.exits.items()}
    said = {report.rank: report for report in reports}
    silent = exits.keys() | {rank for report in reports for rank in report.silent_before}
    silent -= said.keys()
    if not said and not silent:
        return _of_agents(results)
    # A lost connection is an effect if anything else happened at all.
    moments = {rank: (report.lost_peer, report.moment_ns) for rank, report in said.items()}
    for rank in silent:
        moments[rank] = (False, _end_of_silent(rank, reports, exits.get(rank)))
    first = min(moments, key=lambda rank: moments[rank])
    if first in said:
        return Outcome(said[first].state, first, said[first].error)
    if first not in exits:
        reasons = [f"; {result.error}" for result in results.values() if result.error is not None]
        return Outcome("failed", first, "ended before its function returned" + "".join(reasons))
    # Nobody of ours sends SIGKILL before the first failure.
    if exits[first].code == -signal.SIGKILL and out_of_memory_kills > 0:
        return Outcome("oom", first, "killed by signal SIGKILL: the kernel ran out of memory")
    return Outcome("failed", first, describe_exit(exits[first].code))


def _of_agents(results: Mapping[int, NodeResult]) -> Outcome:
    for _, result in sorted(results.items()):
        if result.error is not None:
            return Outcome("failed", None, result.error)
    return Outcome("ok")


def _end_of_silent(rank: int, reports: Sequence[Report], exit_: Exit | None) -> int:
    """A moment, in ns, before every report that knows of the end of a rank without a report."""
    known = [report.moment_ns - 1 for report in reports if rank in report.silent_before]
    if exit_ is not None:
        known.append(exit_.moment_ns)
    return min(known)


def describe_exit(code: int) -> str:
    """In words: an exit code as ``multiprocessing`` gives it, negative for a signal."""
    if code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its function returned"
