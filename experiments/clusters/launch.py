"""The process that launches one node's ranks, seen from the one that starts and ends it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess

from experiments.clusters import agent, namespaces, ranks

#: What the fork server imports for every agent, beside what the job needs.
ALWAYS_PRELOADED = ("experiments.clusters.agent", "experiments.clusters.elastic")

#: Seconds until an agent whose ranks were killed has ended.
_AGENT_END_S = 2.0


class NodeProcess:
    """One node's agent in a process of its own, forked from the fork server."""

    def __init__(self, context: ForkServerContext, node: agent.Node, job: ranks.Job) -> None:
        self.node = node
        #: How the node's ranks ended, once the agent has said so.
        self.result: agent.NodeResult | None = None
        self.connection: Connection
        self.connection, other_end = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=agent.serve, args=(node, job, other_end), name=f"node{node.node}"
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
            self.result = agent.NodeResult(
                error=f"the agent of node {self.node.node} ended with exit code "
                f"{self._process.exitcode} (negative: a signal)"
            )

    def end(self) -> None:
        """Kill the node's processes."""
        self.connection.close()
        if self.node.namespace is None:
            self._end_group()
        else:
            self._end_inside(self.node.namespace)
        self._process.join()
        self._process.close()

    def _end_inside(self, namespace: str) -> None:
        # The ranks first, so that their agent can reap them.
        spare = frozenset() if self._process.pid is None else frozenset({self._process.pid})
        namespaces.end_processes(namespace, spare=spare)
        self._process.join(_AGENT_END_S)
        self._process.kill()
        namespaces.end_processes(namespace)

    def _end_group(self) -> None:
        # The agent leads a group, unless it has not come that far; its ranks die with it anyway.
        if self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
