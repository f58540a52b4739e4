"""A rented node's side: connects to the runner and launches the ranks that it asks for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil

from experiments import provenance
from experiments.clusters import agent, preload, ranks, scratch, wire
from experiments.clusters.allocation import Allocation
from experiments.clusters.board import Board
from experiments.clusters.counters import out_of_memory_kills, transmitted_bytes
from experiments.clusters.interface import ClusterError
from experiments.clusters.launch import ALWAYS_PRELOADED, NodeProcess
from experiments.clusters.wire import Channel, Lost

#: Seconds between two attempts to reach the runner.
_RETRY_S = 1.0
#: Bytes of each log that travel; the end says why a rank failed.
_LONGEST_LOG = 1_000_000
#: Settings of NCCL that name a machine, a file or an identity.
_PRIVATE_SETTINGS = ("FILE", "HOST", "COMM_ID", "PATH", "PLUGIN")


def serve(
    allocation: Allocation,
    number: int,
    preloaded: Sequence[str],
    *,
    patience_s: float,
    say: Callable[[str], None],
) -> None:
    """Be node ``number`` for one runner after another, until none comes for ``patience_s``.

    A runner that was killed may so be resumed without starting the nodes again. Raises
    ``ClusterError`` if a module cannot be imported, the runner refuses this node, or none ever
    came.
    """
    modules = (*ALWAYS_PRELOADED, *preloaded)
    context = preload.start(modules)
    served = False
    while (channel := _reach(allocation, patience_s)) is not None:
        try:
            hello = _introduce(allocation, number, channel)
            say(f"node {number}: the runner is here; interface {hello.interface}")
            served = True
            _Node(context, modules, hello).serve(channel)
        except Lost as lost:
            say(f"node {number}: the runner is gone ({lost}); waiting for another")
        finally:
            channel.close()
    if not served:
        host, port = allocation.head
        raise ClusterError(f"no runner at {host} port {port} for {patience_s:g} s")


def _reach(allocation: Allocation, patience_s: float) -> Channel | None:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return wire.connect(allocation.head, allocation.token)
        except Lost as lost:
            if time.monotonic() > deadline:
                raise ClusterError(f"the runner did not take this node: {lost}") from lost
        except OSError:
            if time.monotonic() > deadline:
                return None
        time.sleep(_RETRY_S)


def _introduce(allocation: Allocation, number: int, channel: Channel) -> wire.Hello:
    address = channel.local_address
    interface = _interface_with(address)
    hello = wire.Hello(
        node=number,
        ranks=allocation.ranks_per_node,
        address=address,
        interface=interface,
        commit=provenance.gather().commit,
        network=_describe_network(interface, os.environ),
    )
    channel.send(hello)
    answer = channel.expect(wire.Answer)
    if answer.refusal is not None:
        raise ClusterError(f"the runner refuses node {number}: {answer.refusal}")
    return hello


def _interface_with(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ClusterError(f"no network interface of this node has the address {address}")


def _describe_network(interface: str, environment: Mapping[str, str]) -> dict[str, Any]:
    counted = environment.get("FCDP_INTERFACE") or interface
    try:
        transmitted_bytes(counted)
    except ValueError as error:
        raise ClusterError(f"FCDP_INTERFACE: {error}") from error
    speed = psutil.net_if_stats()[interface].speed
    settings = {
        name: provenance.scrub(value)
        for name, value in sorted(environment.items())
        if name.startswith("NCCL_") and not any(part in name for part in _PRIVATE_SETTINGS)
    }
    return {
        "interface": interface,
        "counted_interface": counted,
        # As the driver says; virtual interfaces say nothing.
        "nominal_bits_per_s": speed * 10**6 or None,
        "nccl": settings,
    }


class _Node:
    """This node, while one runner uses it."""

    def __init__(
        self, context: ForkServerContext, modules: tuple[str, ...], hello: wire.Hello
    ) -> None:
        self._context = context
        self._modules = modules
        self._hello = hello

    def serve(self, channel: Channel) -> None:
        """Run one task after another. Raises ``Lost`` when the runner is gone."""
        while True:
            task = channel.expect(wire.Task)
            with scratch.folder() as folder:
                channel.send(self._run(task, folder, channel))

    def _run(self, task: wire.Task, folder: Path, channel: Channel) -> wire.Idle:
        kills_before = out_of_memory_kills()
        logs = Path(task.logs)
        shared = (logs / task.marker).exists()
        if not shared:
            logs = folder / "logs"
            logs.mkdir()
        board = Board(folder, task.nodes * self._hello.ranks)
        board.create()
        if self._hello.node == 0 and not shared:
            channel.send(wire.Ended(exits=[], error=f"node 0 does not see {task.logs}: {_APART}"))
            channel.expect(wire.Finish)
        else:
            job = ranks.Job(task.entry, _arguments(task, folder), logs, board)
            process = NodeProcess(self._context, self._described(task, folder), job)
            try:
                _follow(process, channel)
            finally:
                process.end()
        return wire.Idle(
            reports=_reports(board),
            logs={} if shared else _logs(logs),
            out_of_memory_kills=out_of_memory_kills() - kills_before,
        )

    def _described(self, task: wire.Task, folder: Path) -> agent.Node:
        hello = self._hello
        return agent.Node(
            node=hello.node,
            nodes=task.nodes,
            ranks_per_node=hello.ranks,
            namespace=None,
            address=hello.address,
            master_address=task.master_address,
            port=task.port,
            environment=self._environment() | task.environment,
            preload=self._modules,
            scratch=str(folder / "temporary"),
            timeout_s=task.timeout_s,
        )

    def _environment(self) -> dict[str, str]:
        interface = self._hello.interface
        return {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": f"={interface}",
            **os.environ,
            "FCDP_INTERFACE": self._hello.network["counted_interface"],
        }


_APART = (
    "start its agent on the runner's machine, or give the run a directory that both see (--output)"
)


def _follow(process: NodeProcess, channel: Channel) -> None:
    """Until the runner says that the job is over; tell it when the ranks end before."""
    told = False
    while True:
        ends = [channel.fileno()] if told else [channel.fileno(), process.connection.fileno()]
        wait(ends)
        if channel.poll(0):
            channel.expect(wire.Finish)
            return
        if not told:
            process.collect()
            if process.result is not None:
                channel.send(_ended(process.result))
                told = True


def _ended(result: agent.NodeResult) -> wire.Ended:
    now = time.monotonic_ns()
    exits = [
        wire.RankExit(rank=rank, code=exit_.code, age_ns=now - exit_.moment_ns)
        for rank, exit_ in result.exits.items()
    ]
    return wire.Ended(exits=exits, error=result.error)


def _reports(board: Board) -> list[wire.RankReport]:
    now = time.monotonic_ns()
    return [
        wire.RankReport(
            rank=report.rank,
            age_ns=now - report.moment_ns,
            state=report.state,
            error=report.error,
            lost_peer=report.lost_peer,
            silent_before=report.silent_before,
        )
        for report in board.reports()
    ]


def _arguments(task: wire.Task, folder: Path) -> tuple[str, ...]:
    """The arguments, with files that this node does not see written to ``folder``."""
    arguments = []
    for i, argument in enumerate(task.arguments):
        if argument in task.files and not Path(argument).exists():
            copy = folder / f"argument{i}"
            copy.write_text(task.files[argument], encoding="utf-8")
            argument = str(copy)
        arguments.append(argument)
    return tuple(arguments)


def _logs(directory: Path) -> dict[str, str]:
    texts = {}
    for file in sorted(directory.glob("*.log")):
        texts[file.name] = file.read_bytes()[-_LONGEST_LOG:].decode("utf-8", errors="replace")
    return texts
