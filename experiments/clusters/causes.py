"""The root cause of a failed launch: which rank failed first and why, from what ranks leave behind.

Exit codes have no order, and the errors that one rank's end causes on the others follow within
milliseconds. Here the order is kept by cause rather than by clock: a rank holds a lock on its file,
which the kernel releases when the process ends *before* it closes its sockets. A rank that fails
therefore sees which ranks had ended silently before it did.
"""

import errno
import fcntl
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from experiments.clusters.interface import Outcome

_DONE = "done\n"

#: How gloo, NCCL and the store say that the other end of a connection is gone.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo/transport|"
    r"remote process exited|failed to recv|Connection was likely closed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process whose function had not returned."""

    #: Exit code; negative: the number of the signal that killed it.
    code: int
    #: Time at which it was noticed, on the clock of ``time.monotonic_ns``.
    moment_ns: int


@dataclass(frozen=True)
class NodeResult:
    """The ends of one node's ranks."""

    #: Ends of ranks, by global rank, that failed before their agent ended the others.
    exits: dict[int, Exit] = field(default_factory=dict)
    #: Traceback of the agent itself, if it could not launch the ranks.
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every rank of the node has returned."""
        return not self.exits and self.error is None


@dataclass(frozen=True)
class Report:
    """An exception that ended a rank."""

    rank: int
    #: When it reached the end of the rank's function, on the clock of ``time.monotonic_ns``.
    moment_ns: int
    state: Literal["failed", "oom"]
    #: The traceback.
    error: str
    #: Whether it says that another process is gone: then it is an effect rather than a cause.
    lost_peer: bool
    #: Ranks that had ended before without a report.
    silent_before: list[int]


class Board:
    """A directory with a file per rank: the parent creates them, ranks write them, all may read."""

    def __init__(self, directory: Path, ranks: range) -> None:
        self._directory = directory
        #: Global ranks that share the directory.
        self.ranks = ranks
        for rank in ranks:
            self._life(rank).touch()

    @contextmanager
    def alive(self, rank: int) -> Iterator[None]:
        """Mark this process as ``rank``; leaving without an exception says it has finished."""
        with self._life(rank).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
            file.write(_DONE)

    def report(self, rank: int, error: BaseException) -> None:
        """Write down the exception that is being handled, first of all after catching it."""
        report = Report(
            rank=rank,
            moment_ns=time.monotonic_ns(),
            state="oom" if is_out_of_memory(error) else "failed",
            error="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            lost_peer=isinstance(error, ConnectionError) or bool(_LOST_PEER.search(str(error))),
            silent_before=sorted(self.silent(besides=rank)),
        )
        # Readers see the whole report or none.
        partial = self._directory / f"rank{rank}.partial"
        partial.write_text(json.dumps(asdict(report)))
        partial.rename(self._report(rank))

    def reports(self) -> list[Report]:
        paths = (self._report(rank) for rank in self.ranks)
        return [Report(**json.loads(path.read_text())) for path in paths if path.exists()]

    def silent(self, besides: int | None = None) -> set[int]:
        """Ranks whose process has begun and ended without finishing or writing a report.

        A rank must leave itself out (``besides``): a process that closes any handle of a file
        loses its lock on it.
        """
        silent = set()
        for rank in self.ranks:
            if rank == besides:
                continue
            with self._life(rank).open() as file, suppress(OSError):
                # Shared: two readers at once do not take each other for the living rank.
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                text = file.read()
                if text and not text.endswith(_DONE) and not self._report(rank).exists():
                    silent.add(rank)
        return silent

    def _life(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.life"

    def _report(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, certainly means that memory ran out."""
    torch = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        # On the host torch raises a plain RuntimeError.
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error))
        or (error.__cause__ is not None and is_out_of_memory(error.__cause__))
    )


def outcome(
    results: Mapping[int, NodeResult], reports: Sequence[Report], *, out_of_memory_kills: int
) -> Outcome:
    """The outcome of a launch that was within its time, with its root cause.

    ``results`` has the agents' results by node, ``reports`` the exceptions that ended ranks, and
    ``out_of_memory_kills`` is the number of processes that the kernel killed meanwhile because
    memory ran out.
    """
    exits = {rank: exit_ for result in results.values() for rank, exit_ in result.exits.items()}
    by_rank = {report.rank: report for report in reports}
    silent = exits.keys() | {rank for report in reports for rank in report.silent_before}
    silent -= by_rank.keys()
    if not by_rank and not silent:
        errors = (results[node].error for node in sorted(results))
        broken = next((error for error in errors if error is not None), None)
        return Outcome("ok") if broken is None else Outcome("failed", None, broken)
    # A lost connection is an effect if anything else happened at all.
    moments = {rank: (report.lost_peer, report.moment_ns) for rank, report in by_rank.items()}
    for rank in silent:
        # It ended before every report that names it.
        known = [report.moment_ns - 1 for report in reports if rank in report.silent_before]
        if rank in exits:
            known.append(exits[rank].moment_ns)
        moments[rank] = (False, min(known))
    first = min(moments, key=lambda rank: moments[rank])
    if first in by_rank:
        return Outcome(by_rank[first].state, first, by_rank[first].error)
    if first not in exits:
        reasons = [f"; {result.error}" for result in results.values() if result.error is not None]
        return Outcome("failed", first, "ended before its function returned" + "".join(reasons))
    # None of our processes sends SIGKILL before the first failure.
    if exits[first].code == -signal.SIGKILL and out_of_memory_kills > 0:
        return Outcome("oom", first, "killed by signal SIGKILL: the kernel ran out of memory")
    return Outcome("failed", first, describe_exit(exits[first].code))


def describe_exit(code: int) -> str:
    """An exit code in words, as ``multiprocessing`` gives it: negative for a signal."""
    if code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"ended with exit code {code} before its function returned"
