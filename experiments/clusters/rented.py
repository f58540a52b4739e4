"""A cluster of real nodes: an agent on each of them, started once, launches the ranks of all jobs.

The runner listens at one address, that of ``FCDP_HEAD``; the agents (``node.serve``) come to it.
Nodes need no common file system: node 0 runs on the runner's machine, and what other nodes have
to know or to say travels over their agents' connections.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from experiments import provenance
from experiments.clusters import causes, ranks, wire
from experiments.clusters.agent import Exit, NodeResult
from experiments.clusters.allocation import Allocation
from experiments.clusters.board import Report
from experiments.clusters.interface import ClusterError, LostNodeError, Outcome
from experiments.clusters.wire import Channel, Lost
from experiments.records import ClusterSpec

#: Seconds until all agents must be here, ...
_GATHERING_S = 600.0
#: ... for the other nodes' ranks to end by themselves after the first failure, ...
_GRACE_S = 5.0
#: ... and for a node to end what still runs.
_FINISHING_S = 30.0


class RentedCluster:
    """The nodes of an allocation, whose links are what they are.

    A context manager: ``__enter__`` waits until the agents of all nodes are here; ``__exit__``
    lets them go, and they end what still runs. ``ClusterError`` says which node is missing or why
    one cannot take part.
    """

    evidence: Literal["measured", "emulated", "simulated"] = "measured"

    def __init__(
        self, allocation: Allocation, spec: ClusterSpec, gathering_s: float = _GATHERING_S
    ) -> None:
        if (spec.nodes, spec.ranks_per_node) != (allocation.nodes, allocation.ranks_per_node):
            raise ClusterError(
                f"{spec.nodes} nodes × {spec.ranks_per_node} ranks are asked for, and "
                f"{allocation.nodes} × {allocation.ranks_per_node} are rented; "
                "--cluster rented takes what is there"
            )
        self.nodes = allocation.nodes
        self.ranks_per_node = allocation.ranks_per_node
        self._allocation = allocation
        self._port = spec.port
        self._gathering_s = gathering_s
        self._agents: dict[int, _Agent] = {}

    def __enter__(self) -> RentedCluster:
        with _Reception(self._allocation) as reception:
            try:
                self._gather(reception)
            except BaseException:
                self._release()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _gather(self, reception: _Reception) -> None:
        commit = provenance.gather().commit
        deadline = time.monotonic() + self._gathering_s
        while missing := set(range(self.nodes)) - self._agents.keys():
            came = reception.next(deadline - time.monotonic())
            if came is None:
                raise ClusterError(
                    f"no agent of node {', '.join(map(str, sorted(missing)))} after "
                    f"{self._gathering_s:g} s: start `python -m experiments node` on each node"
                )
            channel, hello = came
            refusal = self._refusal(hello, commit)
            with suppress(Lost):
                channel.send(wire.Answer(refusal=refusal))
            if refusal is not None:
                channel.close()
                raise ClusterError(refusal)
            self._agents[hello.node] = _Agent(channel, hello)

    def _refusal(self, hello: wire.Hello, commit: str | None) -> str | None:
        """Why a node cannot take part."""
        name = f"node {hello.node} at {hello.address}"
        if hello.node >= self.nodes:
            return f"{name}: allowed are nodes 0 to {self.nodes - 1}"
        if hello.node in self._agents:
            return f"{name}: an agent of that node is here already"
        if hello.ranks != self.ranks_per_node:
            return f"{name} runs {hello.ranks} ranks, the runner asks for {self.ranks_per_node}"
        if hello.commit != commit:
            return f"{name} has commit {hello.commit}, the runner {commit}"
        return None

    def _release(self) -> None:
        for each in self._agents.values():
            each.channel.close()
        self._agents.clear()

    def shape(self, bits_per_s: int | None) -> dict[str, Any]:
        """Describe the network. Raises ``ClusterError`` for a limit, which nobody sets here."""
        if bits_per_s is not None:
            raise ClusterError("the links of rented nodes are not limited to a bandwidth")
        networks = {f"node{node}": self._agents[node].hello.network for node in range(self.nodes)}
        first, *others = networks.values()
        return networks if any(other != first for other in others) else first

    def run(
        self,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: Path,
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> Outcome:
        """Call ``entry`` on every rank, in fresh processes; see ``Cluster.run``.

        Ranks see their agent's environment and ``environment``, what torchrun sets, and
        ``FCDP_INTERFACE``. Arguments that name text files here are carried to nodes that do not
        see them. Raises ``LostNodeError`` if a node's agent is gone, and ``ValueError`` for an
        ``entry`` that is not of the form "package.module:function".
        """
        ranks.split(entry)
        if len(self._agents) != self.nodes:
            raise ClusterError("the cluster is not built: use it inside its `with` block")
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        marker = logs / f".{secrets.token_hex(8)}"
        marker.touch()
        task = wire.Task(
            entry=entry,
            arguments=list(arguments),
            files={name: Path(name).read_text() for name in arguments if Path(name).is_file()},
            logs=str(logs),
            marker=marker.name,
            environment=dict(environment),
            nodes=self.nodes,
            master_address=self._agents[0].hello.address,
            port=self._port,
            timeout_s=timeout_s,
        )
        try:
            for each in self._agents.values():
                each.start(task)
            in_time = self._wait_for_ranks(timeout_s)
            for each in self._agents.values():
                each.finish()
            self._wait_until_idle()
        finally:
            marker.unlink(missing_ok=True)
        ended = self._outcome(logs)
        if ended.state == "ok" and not in_time:
            return Outcome("timeout", None, f"did not end within {timeout_s:g} s")
        return ended

    def _wait_for_ranks(self, timeout_s: float) -> bool:
        """Wait for the ranks, but not long for those that others' failures hold up."""
        deadline = time.monotonic() + timeout_s
        while running := [each for each in self._agents.values() if each.result is None]:
            if not _collect(running, deadline - time.monotonic()):
                return False
            if any(each.result and not each.result.ok for each in running):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return True

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _FINISHING_S
        while busy := [each for each in self._agents.values() if each.idle is None]:
            if not _collect(busy, deadline - time.monotonic()):
                raise busy[0].lost(f"has not ended its ranks for {_FINISHING_S:g} s")

    def _outcome(self, logs: Path) -> Outcome:
        agents = dict(sorted(self._agents.items()))
        idles = [each.idle for each in agents.values() if each.idle is not None]
        for idle in idles:
            for name, text in idle.logs.items():
                (logs / Path(name).name).write_text(text, encoding="utf-8")
        return causes.outcome(
            {node: each.result for node, each in agents.items() if each.result is not None},
            [report for each in agents.values() for report in each.reports],
            out_of_memory_kills=sum(idle.out_of_memory_kills for idle in idles),
        )


class _Agent:
    """The runner's side of one node's agent; its methods raise ``LostNodeError``."""

    def __init__(self, channel: Channel, hello: wire.Hello) -> None:
        self.channel = channel
        self.hello = hello
        #: How the node's ranks ended, once they have; what they left, once nothing of them runs.
        self.result: NodeResult | None = None
        self.reports: list[Report] = []
        self.idle: wire.Idle | None = None

    def start(self, task: wire.Task) -> None:
        self.result, self.reports, self.idle = None, [], None
        self._send(task)

    def finish(self) -> None:
        """Have it end what still runs."""
        self._send(wire.Finish())

    def collect(self) -> None:
        """Take a message as soon as it has come: what happened is dated by its age."""
        try:
            message = self.channel.receive()
        except Lost as error:
            raise self.lost(str(error)) from error
        now = time.monotonic_ns()
        if isinstance(message, wire.Ended):
            exits = {each.rank: Exit(each.code, now - each.age_ns) for each in message.exits}
            self.result = NodeResult(exits, message.error)
        elif isinstance(message, wire.Idle):
            self.reports = [_dated(report, now) for report in message.reports]
            self.idle = message
        else:
            raise self.lost(f"said {message.kind!r} while its ranks ran")

    def lost(self, reason: str) -> LostNodeError:
        return LostNodeError(
            f"node {self.hello.node} at {self.hello.address} is lost ({reason}); start its agent "
            "again, on that node or on another"
        )

    def _send(self, message: wire.Message) -> None:
        try:
            self.channel.send(message)
        except Lost as error:
            raise self.lost(str(error)) from error


def _collect(agents: Sequence[_Agent], timeout_s: float) -> bool:
    """Wait for messages and take them; whether one came in time."""
    by_channel = {each.channel.fileno(): each for each in agents}
    ready = wait(list(by_channel), timeout=max(0.0, timeout_s))
    for descriptor in ready:
        by_channel[cast(int, descriptor)].collect()
    return bool(ready)


def _dated(report: wire.RankReport, now_ns: int) -> Report:
    return Report(moment_ns=now_ns - report.age_ns, **report.model_dump(exclude={"age_ns"}))


class _Reception:
    """Where agents come in: listens at one address, and lets in who knows the token.

    Every caller is asked in a thread of its own, so that a silent one holds nobody up.
    """

    def __init__(self, allocation: Allocation) -> None:
        self._allocation = allocation
        self._came: queue.SimpleQueue[tuple[Channel, wire.Hello]] = queue.SimpleQueue()

    def __enter__(self) -> _Reception:
        host, port = self._allocation.head
        try:
            self._listener = socket.create_server((host, port), backlog=128)
        except OSError as error:
            raise ClusterError(
                f"cannot listen at FCDP_HEAD = {host}:{port}: {error}; it must be an address of "
                "this machine, and the port must be free"
            ) from error
        threading.Thread(target=self._listen, name="reception", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake the thread.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while (late := self.next(0)) is not None:
            late[0].close()

    def next(self, timeout_s: float) -> tuple[Channel, wire.Hello] | None:
        """An agent that has come and said who it is; ``None`` if none comes in time."""
        try:
            return self._came.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._let_in, args=(connected,), daemon=True).start()

    def _let_in(self, connected: socket.socket) -> None:
        with suppress(Lost):
            channel = wire.welcome(connected, self._allocation.token)
            try:
                self._came.put((channel, channel.expect(wire.Hello)))
            except Lost:
                channel.close()
