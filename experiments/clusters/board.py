"""What the ranks of one job leave for the parent: who lives, who finished, who failed and why.

Torchelastic's failures carry whole seconds; the errors that one rank's end causes on the others
follow within milliseconds. Here the order is kept by cause rather than by clock: a rank holds a
lock on its file, which the kernel releases when the process ends *before* it closes its sockets.
A rank that fails therefore sees which ranks had ended silently before it did.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_DONE = "done\n"

#: How gloo, NCCL and the store say that the other end of a connection is gone.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo/transport|"
    r"remote process exited|failed to recv|Connection was likely closed",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Report:
    """An exception that ended a rank."""

    rank: int
    #: When it reached the end of the rank's function, on the clock of ``time.monotonic_ns``.
    moment_ns: int
    state: Literal["failed", "oom"]
    #: The traceback.
    error: str
    #: Whether it says that another process is gone, so that it is rather an effect than a cause.
    lost_peer: bool
    #: Ranks that had ended without a word before.
    silent_before: list[int]


class Board:
    """A directory with a file a rank; the parent creates it, the ranks write, all may read."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._directory = directory
        self._ranks = ranks

    def create(self) -> None:
        """Make the empty files of all ranks."""
        for rank in range(self._ranks):
            self._life(rank).touch()

    @contextmanager
    def alive(self, rank: int) -> Iterator[None]:
        """Say that this process is ``rank``; leaving without an exception says it has finished."""
        with self._life(rank).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield
            file.write(_DONE)

    def report(self, rank: int, error: BaseException) -> None:
        """Leave the exception that is being handled; the first thing to do after catching it."""
        report = Report(
            rank=rank,
            moment_ns=time.monotonic_ns(),
            state="oom" if is_out_of_memory(error) else "failed",
            error="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            lost_peer=_is_lost_peer(error),
            silent_before=sorted(self.silent(besides=rank)),
        )
        # Readers see the whole report or none.
        partial = self._directory / f"rank{rank}.partial"
        partial.write_text(json.dumps(asdict(report)))
        partial.rename(self._report(rank))

    def reports(self) -> list[Report]:
        """The exceptions that have ended ranks so far."""
        paths = (self._report(rank) for rank in range(self._ranks))
        return [Report(**json.loads(path.read_text())) for path in paths if path.exists()]

    def silent(self, besides: int | None = None) -> set[int]:
        """Ranks whose process has begun and ended, neither finished nor with a report.

        A rank must leave itself out (``besides``): a process that closes any handle of a file
        loses its lock on it.
        """
        ranks = (rank for rank in range(self._ranks) if rank != besides)
        return {rank for rank in ranks if self._is_silent(rank)}

    def _is_silent(self, rank: int) -> bool:
        with self._life(rank).open() as file:
            try:
                # Shared: two readers at once do not take each other for the living rank.
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return False
            text = file.read()
        return text != "" and not text.endswith(_DONE) and not self._report(rank).exists()

    def _life(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.life"

    def _report(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, certainly means that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # On the host torch raises a plain RuntimeError.
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, ConnectionError) or _LOST_PEER.search(str(error)) is not None
