"""Processes of a launch, and what they are told of their machine.

The agent of a node (``agent``) is one of them, on every kind of cluster: an emulated node's is
forked from the fork server, a rented one's is started afresh by ``node``.

The fork server has imported everything, and forks the rest. It belongs to the calling process, not
to one cluster: a second cluster finds it warm. It ends with the calling process. It imports this
module when it starts, which pays for the heavy imports once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name

from experiments.clusters import lifetimes, namespaces
from experiments.clusters.causes import NodeResult, describe_exit
from experiments.clusters.interface import ClusterError
from experiments.records.environment import named, passed_on

#: Module that the fork server imports for every agent, beside those that the launch needs.
AGENT = "experiments.clusters.agent"
#: The environment variable with the JSON list of modules that the fork server imports.
_MODULES_VARIABLE = "FCDP_PRELOAD"
#: Seconds until an agent whose ranks were killed has ended.
_AGENT_END_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, as a process on it needs to know it."""

    #: The network namespace that is the machine; ``None`` for one that is real.
    namespace: str | None = None
    #: The whole environment of its processes, but for what torchrun adds.
    environment: dict[str, str] = field(repr=False)
    #: A directory, not there yet, for temporary files of its processes.
    scratch: str = ""

    def end_processes(self, spare: frozenset[int] = frozenset()) -> None:
        """Kill what this process has started on the machine, but for ``spare``."""
        if self.namespace is None:
            lifetimes.end_descendants(spare)
        else:
            namespaces.end_processes(self.namespace, spare)


@dataclass(frozen=True, kw_only=True)
class Node(Machine):
    """One node, as its agent needs to know it."""

    node: int
    nodes: int
    ranks_per_node: int
    #: Address of node 0, where the ranks meet.
    master_address: str
    port: int


class Started:
    """A process on a machine, which says once how it, or the ranks that it launches, ended."""

    def __init__(
        self,
        context: ForkServerContext | SpawnContext,
        name: str,
        serve: str,
        machine: Machine,
        *arguments: object,
    ) -> None:
        """It calls the function ``serve`` of ``agent`` with the machine and ``arguments``."""
        self.name = name
        #: Its own report; the reason why it ended where it has made none.
        self.result: NodeResult | None = None
        self.connection: Connection
        self.connection, other_end = context.Pipe()
        self._machine = machine
        self._process: BaseProcess = context.Process(
            target=_serve, args=(f"{AGENT}:{serve}", machine, *arguments, other_end), name=name
        )
        with other_end:
            self._process.start()

    def collect(self) -> None:
        """Take the result, if it has been sent or the process has ended without."""
        if self.result is not None or not self.connection.poll():
            return
        try:
            self.result = self.connection.recv()
        except EOFError:
            self._process.join()
            self.result = NodeResult(
                error=f"{self.name}: {describe_exit(self._process.exitcode or 0)}"
            )

    def end(self) -> None:
        """Kill the machine's processes and wait until they are gone."""
        self.connection.close()
        # Ranks first, so that their agent can reap them; a process beside them has none.
        if isinstance(self._machine, Node):
            pid = self._process.pid
            self._machine.end_processes(frozenset() if pid is None else frozenset({pid}))
            self._process.join(_AGENT_END_S)
        self._process.kill()
        self._machine.end_processes()
        self._process.join()
        self._process.close()


def _serve(entry: str, *arguments: object) -> None:
    # By its name: the process that starts this one needs no torch, which it imports.
    resolve_name(entry)(*arguments)


def fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Start the fork server if there is none, and check that ``modules`` can be imported.

    Modules that an earlier caller did not name are imported by every rank: a later cluster with
    other modules works, but slower. Variables that libraries read while they are imported count as
    they are now. Raises ``ClusterError`` with the traceback of a module that cannot be imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    variables = {
        _MODULES_VARIABLE: json.dumps(list(modules)),
        # The fork server starts with an interpreter's default path, not with this process's.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # OpenMP reads it once, when torch is imported.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # Emulated nodes reach no hub, which transformers would ask for long.
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        # A library that asks for GPUs while it is imported must not start the CUDA runtime, which
        # no forked process could use any more.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    before = dict(os.environ)
    try:
        # The kernel shows a forked process's environment as the fork server started with it.
        os.environ.clear()
        os.environ.update(passed_on(before, named(before)) | variables)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    receiver, sender = context.Pipe(duplex=False)
    with receiver:
        process = context.Process(target=_send_failure, args=(list(modules), sender))
        try:
            process.start()
            sender.close()
            failure = receiver.recv()
        except (EOFError, OSError) as error:
            raise ClusterError(
                f"the fork server ended while importing {', '.join(modules)}: {error!r}; "
                "its standard error says why"
            ) from error
        process.join()
    if failure is not None:
        raise ClusterError(failure)
    return context


def _send_failure(modules: Sequence[str], sender: Connection) -> None:
    sender.send(_import(modules))


def _import(modules: Sequence[str]) -> str | None:
    """Import modules; returns what is to be said of the last one that cannot be imported."""
    failure = None
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:
            reason = traceback.format_exc()
            failure = f"cannot import {module}, a module to preload:\n{reason}"
    return failure


# What cannot be imported is told by the child that is asked for it.
_import(json.loads(os.environ.get(_MODULES_VARIABLE, "[]")))
