"""An emulated node's process, which launches its ranks, as the one that starts it sees it."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from experiments.clusters import namespaces
from experiments.clusters.causes import NodeResult
from experiments.clusters.ranks import Launch, Node

#: What the fork server imports for every agent, beside what the launch needs.
ALWAYS_PRELOADED = ("experiments.clusters.agent",)

#: Seconds until an agent whose ranks were killed has ended.
_AGENT_END_S = 2.0


class NodeProcess:
    """One node's agent in a process of its own, forked from the fork server."""

    def __init__(self, context: ForkServerContext, node: Node, launch: Launch) -> None:
        self.node = node
        #: How the node's ranks ended, once the agent has said so.
        self.result: NodeResult | None = None
        self.connection: Connection
        self.connection, other_end = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=_serve, args=(node, launch, other_end), name=f"node{node.node}"
        )
        with other_end:
            self._process.start()

    def collect(self) -> None:
        """Take the agent's result, if it has sent one or has ended without."""
        if not self.connection.poll():
            return
        try:
            self.result = self.connection.recv()
        except EOFError:
            self._process.join()
            self.result = NodeResult(
                error=f"the agent of node {self.node.node} ended with exit code "
                f"{self._process.exitcode} (negative: a signal)"
            )

    def end(self) -> None:
        """Kill the node's processes and wait until they are gone."""
        self.connection.close()
        # The ranks first, so that their agent can reap them.
        spare = frozenset() if self._process.pid is None else frozenset({self._process.pid})
        namespaces.end_processes(self.node.namespace, spare=spare)
        self._process.join(_AGENT_END_S)
        self._process.kill()
        namespaces.end_processes(self.node.namespace)
        self._process.join()
        self._process.close()


def _serve(node: Node, launch: Launch, parent: Connection) -> None:
    # Here rather than above: the process that starts this one needs no torch.
    from experiments.clusters import agent

    agent.serve(node, launch, parent)
