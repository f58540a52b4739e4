"""The agent of one node: enters its namespace, if it has one, and launches the node's ranks."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from multiprocessing.connection import Connection

from pyroute2 import netns

from experiments import provenance
from experiments.clusters import _preloaded, lifelines, namespaces, ranks


@dataclass(frozen=True)
class Node:
    """What one node's agent needs to know."""

    node: int
    nodes: int
    ranks_per_node: int
    #: The network namespace that is the node; ``None`` where the node is this machine.
    namespace: str | None
    #: Addresses of this node and of node 0, where the ranks meet.
    address: str
    master_address: str
    port: int
    #: The whole environment of the node's ranks, but for what torchrun adds and for secrets.
    environment: dict[str, str]
    #: Modules that should be imported already.
    preload: tuple[str, ...]
    #: A directory, not there yet, for temporary files: torchelastic's and the ranks'.
    scratch: str
    timeout_s: float


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process before its function has returned."""

    #: Negative: the number of the signal that killed it.
    code: int
    #: When it was noticed, on the clock of ``time.monotonic_ns``.
    moment_ns: int


@dataclass(frozen=True)
class NodeResult:
    """How the ranks of one node ended."""

    #: The ranks, by global rank, that failed before their agent ended the others.
    exits: dict[int, Exit] = field(default_factory=dict)
    #: Traceback of the agent itself, if it could not launch the ranks.
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every rank of the node has returned."""
        return not self.exits and self.error is None


def serve(node: Node, job: ranks.Job, parent: Connection) -> None:
    """Run the ranks of one node in this fresh process and send their ``NodeResult``."""
    # A group of its own: the terminal's Ctrl-C reaches the parent only, which ends the job.
    os.setsid()
    lifelines.die_with(_preloaded.SERVER)
    lifelines.die_with_launcher(lambda: _end_others(node.namespace))
    ranks.write_to(job.logs / f"node{node.node}.log")
    with suppress(BrokenPipeError):  # the parent has given up meanwhile
        try:
            _serve(node, job, parent)
        except Exception:
            error = f"the agent of node {node.node} failed:\n{traceback.format_exc()}"
            parent.send(NodeResult(error=error))


def _serve(node: Node, job: ranks.Job, parent: Connection) -> None:
    os.environ.clear()
    os.environ.update(provenance.without_secrets(node.environment))
    _put_temporary_files_in(node.scratch)
    if node.namespace is not None:
        netns.setns(node.namespace, flags=0)
    _search_first(node.environment.get("PYTHONPATH", "").split(os.pathsep))
    _preloaded.import_modules(list(node.preload))
    # Here rather than above: the parent imports this module, and needs no torch.
    from experiments.clusters import elastic

    with elastic.launched(node, job) as result:
        parent.send(result)
        # Other nodes may still use the store: until the parent, who closes its end, has heard
        # from all of them.
        parent.poll(None)


def _put_temporary_files_in(directory: str) -> None:
    """Have the temporary files of this node and its ranks meet no other's and end with the job."""
    os.mkdir(directory)
    os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # What was imported before may have asked for the directory already.


def _search_first(folders: Sequence[str]) -> None:
    """Import from these folders before all others, as an interpreter that starts with them does.

    Raises ``RuntimeError`` where a module that they have was preloaded from elsewhere.
    """
    new = [path for path in map(os.path.abspath, filter(None, folders)) if path not in sys.path]
    late = [name for name in sys.modules if "." not in name and PathFinder.find_spec(name, new)]
    if late:
        raise RuntimeError(f"{', '.join(late)}: preloaded, so not imported from {', '.join(new)}")
    sys.path[:0] = new


def _end_others(namespace: str | None) -> None:
    if namespace is None:
        os.killpg(os.getpid(), signal.SIGKILL)
    else:
        namespaces.end_processes(namespace, spare=frozenset({os.getpid()}))
