"""A rank's process: what it does around the launch's function.

Forked by an emulated node's agent, or started by a rented node's torchrun as a module.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from experiments.clusters import lifetimes
from experiments.clusters.causes import Board


@dataclass(frozen=True)
class Launch:
    """A function that every rank of a cluster calls once, in a process of its own."""

    #: "package.module:function".
    entry: str
    arguments: tuple[str, ...]
    logs: Path
    board: Board


_FILE = "launch.json"


def leave(launch: Launch, folder: Path) -> None:
    """Write the launch to ``folder``, where ``main`` finds it; the board must be ``folder``'s."""
    written = {
        "entry": launch.entry,
        "arguments": launch.arguments,
        "logs": str(launch.logs),
        "ranks": [launch.board.ranks.start, launch.board.ranks.stop],
    }
    (folder / _FILE).write_text(json.dumps(written), encoding="utf-8")


def main(folder: Path, torchrun: int) -> None:
    """Call the function of the launch in ``folder``; ``torchrun`` is the pid of the parent."""
    lifetimes.die_with(torchrun)
    # With SIGTERM torchrun ends the others of a rank that failed, and SIGKILL follows in a second:
    # until then a rank that is the cause, or has lost a peer, can say so. A handler rather than
    # SIG_IGN, which would outlive an exec; what this process forks ends as usual.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    written = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    board = Board(folder, range(*written["ranks"]))
    _run(Launch(written["entry"], tuple(written["arguments"]), Path(written["logs"]), board))
    _exit_in_order()


#: The variable that has the secret of a launch with processes beside its ranks.
SECRET = "FCDP_RUN_SECRET"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One emulated machine, as a process on it needs to know it."""

    #: The network namespace that is the machine.
    namespace: str
    #: The whole environment of its processes, but for what torchrun adds and for secrets.
    environment: dict[str, str]
    #: What all processes of the launch share, if it has processes beside its ranks.
    secret: str | None = field(default=None, repr=False)
    #: Modules that should be imported already.
    preload: tuple[str, ...]
    #: A directory, not there yet, for temporary files: torchelastic's and the ranks'.
    scratch: str


@dataclass(frozen=True, kw_only=True)
class Node(Machine):
    """One emulated node, as its agent needs to know it."""

    node: int
    nodes: int
    ranks_per_node: int
    #: Addresses of this node and of node 0, where the ranks meet.
    address: str
    master_address: str
    port: int
    timeout_s: float


def run(launch: Launch, agent: int) -> None:
    """Call the launch's function in the environment that torchelastic has set for this rank.

    ``agent`` is the pid of the process that forked this one.
    """
    lifetimes.die_with(agent)
    # Forked from torchelastic's agent, the rank would raise the agent's exception on SIGTERM, and
    # only once the interpreter runs again: a rank that waits in a collective would go on.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _run(launch)


def _run(launch: Launch) -> None:
    rank = int(os.environ["RANK"])
    write_to(launch.logs / f"rank{rank}.log")
    with launch.board.alive(rank):
        try:
            _set_threads()
            module, name = split(launch.entry)
            getattr(importlib.import_module(module), name)(*launch.arguments)
        except BaseException as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                launch.board.report(rank, error)
                traceback.print_exc()
                _exit_at_once(1)


def split(entry: str) -> tuple[str, str]:
    """Module and name of "package.module:function"; ``ValueError`` if it is not of that form."""
    module, _, name = entry.partition(":")
    if not module or not name.isidentifier():
        raise ValueError(f'entry = {entry!r}: allowed is "package.module:function"')
    return module, name


def write_to(path: Path) -> None:
    """Send standard output and error, Python's and the libraries', to one file, line by line."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Whoever is killed has lost nothing but its last line.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def _set_threads() -> None:
    """Give torch the threads of OMP_NUM_THREADS, which OpenMP read in the fork server."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _exit_in_order() -> None:
    """End as multiprocessing's processes do, and with them the ranks of an emulated node.

    The interpreter's own end would abort a rank one of whose gloo threads has yet to let go of a
    tensor: they are joined only if nothing refers to their process group any more.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _exit_at_once(0)


def _exit_at_once(code: int) -> None:
    """End without waiting for threads or destructors, in which a rank might hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
