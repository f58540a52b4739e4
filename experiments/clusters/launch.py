"""Processes of a launch, and the description of the machine that each runs on.

The agent of a node (``agent``) is one of them, on every kind of cluster: an emulated node's is
forked from the fork server, a rented one's is started afresh by ``node``.
"""

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pkgutil import resolve_name

from experiments.clusters import lifetimes, namespaces
from experiments.clusters.causes import NodeResult, describe_exit

#: Module that the fork server imports for every agent, beside those that the launch needs.
AGENT = "experiments.clusters.agent"
#: Seconds until an agent whose ranks were killed has ended.
_AGENT_END_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, as a process on it needs to know it."""

    #: The network namespace that is the machine; ``None`` for a real one.
    namespace: str | None = None
    #: The whole environment of its processes, but for what torchrun adds.
    environment: dict[str, str] = field(repr=False)
    #: Modules that should be imported already.
    preload: tuple[str, ...] = ()
    #: The cores that its processes run on; none: those of the process that starts them.
    cores: frozenset[int] = frozenset()
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
    #: Whether each rank is a host of its own to NCCL, which else refuses ranks that share a GPU.
    ranks_are_hosts: bool = False
    #: Address of node 0, where the ranks meet.
    master_address: str
    port: int


class Started:
    """A process on a machine, which reports once how it or the ranks that it launches ended."""

    def __init__(
        self,
        context: ForkServerContext | SpawnContext,
        name: str,
        serve: str,
        machine: Machine,
        *arguments: object,
    ) -> None:
        """Start it: it calls ``serve``, a function of ``agent``, with machine and ``arguments``."""
        self.name = name
        #: Its own report; if it ended without one, the reason.
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
        """Take the result, if it has been sent or the process has ended without one."""
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
    # By its name: its module imports torch, which the process that starts this one does not need.
    resolve_name(entry)(*arguments)
