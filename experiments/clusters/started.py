"""The processes of a launch, as the one that starts them sees them.

The agent of a node (``agent``) is one, on every kind of cluster: an emulated node's is forked from
the fork server, a rented one's is started afresh by ``node``.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from experiments.clusters.causes import NodeResult, describe_exit
from experiments.clusters.launch import Launch, Machine, Node

#: Modules that the fork server imports for every agent, beside those that the launch needs.
ALWAYS_PRELOADED = ("experiments.clusters.agent",)

#: Seconds until an agent whose ranks were killed has ended.
_AGENT_END_S = 2.0


class Started:
    """A process on a machine, which says once how it, or the ranks that it launches, ended."""

    def __init__(
        self,
        context: ForkServerContext | SpawnContext,
        name: str,
        serve: str,
        machine: Machine,
        *told: object,
    ) -> None:
        """``serve`` is the function of ``agent`` that it calls, with the machine and ``told``."""
        self.name = name
        #: Its own report; the reason why it ended where it has made none.
        self.result: NodeResult | None = None
        self.connection: Connection
        self.connection, other_end = context.Pipe()
        self._machine = machine
        self._process: BaseProcess = context.Process(
            target=_serve, args=(serve, machine, *told, other_end), name=name
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


def start_agent(context: ForkServerContext | SpawnContext, node: Node, launch: Launch) -> Started:
    """Start the agent of a node, which launches the node's ranks."""
    return Started(context, f"the agent of node {node.node}", "serve", node, launch)


def _serve(function: str, *told: object) -> None:
    # Here rather than above: the process that starts this one needs no torch.
    from experiments.clusters import agent

    getattr(agent, function)(*told)
