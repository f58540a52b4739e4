"""The program that the runner's launcher starts on a rented node, for one question.

The question comes as one line of JSON by standard input, the answer goes as one to standard output.
The input stays open afterwards: where it is closed, the node ends its ranks, whether the runner has
asked for that or is gone. Until the answer both sides send empty lines, so that each notices a dead
link, even if the launcher does not.
"""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
from pydantic import TypeAdapter

from baselines.links import transmitted_bytes
from experiments.clusters import lifetimes
from experiments.clusters.causes import Board, NodeResult, Report
from experiments.clusters.interface import ClusterError, Launch, check_port
from experiments.clusters.launch import Node, Started
from experiments.records import provenance
from experiments.records.environment import named, passed_on, without_secrets
from simulation.files import Strict

#: Seconds between two empty lines, and without one until the other side counts as lost.
BEAT_S = 5.0
SILENCE_S = 40.0
#: Bytes of each log that are sent, its last: they say why a rank failed.
_LONGEST_LOG = 1_000_000
#: Settings of NCCL that name a machine, a file or an identity.
_PRIVATE_SETTINGS = ("FILE", "HOST", "COMM_ID", "PATH", "PLUGIN")
#: Seconds between two looks at the agent.
_WATCH_INTERVAL_S = 0.1

_APART = "the runner must be on the first node, or its directory (--output) one that both see"


class Inquiry(Strict):
    """A question for the description of the node."""

    #: An address of node 0 on the network between nodes.
    head: str
    #: The interface whose bytes are counted, if it is not the one that leads to ``head``.
    counted_interface: str | None


class Description(Strict):
    """The answer to an inquiry."""

    #: The node's address on the way to node 0.
    address: str
    commit: str | None
    #: Description of the node's network, as records have it.
    network: dict[str, Any]


class Order(Strict):
    """An order to start the ranks of one launch on the node."""

    #: The node, without what it adds itself: its scratch directory and its own variables.
    node: Node
    address: str
    #: Its folder of logs is on the runner's machine.
    launch: Launch
    #: Content of those arguments that are names of text files on the runner's machine.
    files: dict[str, str]
    #: Name of a file in that folder: a node that has the file sees the folder.
    marker: str


class Ended(Strict):
    """The answer to an order, once none of its processes runs on the node."""

    result: NodeResult
    reports: list[Report]
    #: The node's clock at its answer, which both of these go by: nodes' clocks differ.
    now_ns: int
    #: Logs by name, if the node does not see the runner's directory for them.
    logs: dict[str, str]
    out_of_memory_kills: int


def main() -> None:
    """Read one question from standard input and answer it."""
    # Whatever else is printed here goes to standard error: the answer must stand alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    # Slurm ends a job with SIGTERM: what was started here must be ended all the same.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    answered = Event()
    beating = Thread(target=_beat, args=(answers, answered), daemon=True)
    beating.start()
    question: TypeAdapter[Inquiry | Order] = TypeAdapter(Inquiry | Order)
    asked = question.validate_json(sys.stdin.buffer.readline())
    answer = describe(asked) if isinstance(asked, Inquiry) else run(asked)
    answered.set()
    beating.join()
    with suppress(BrokenPipeError), open(answers, "wb") as file:  # the runner may be gone
        file.write(answer.model_dump_json().encode() + b"\n")


def _beat(descriptor: int, answered: Event) -> None:
    with suppress(BrokenPipeError):
        while not answered.wait(BEAT_S):
            os.write(descriptor, b"\n")


def describe(inquiry: Inquiry) -> Description:
    """Describe this node as the others see it.

    Raises ``ValueError`` for an interface that is not there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((inquiry.head, 9))  # says from which address; nothing is sent
        address = str(probe.getsockname()[0])
    interface = _interface_with(address)
    counted = inquiry.counted_interface or os.environ.get("FCDP_INTERFACE") or interface
    try:
        transmitted_bytes(counted)
    except ValueError as error:
        raise ValueError(f"FCDP_INTERFACE: {error}") from error
    settings = {
        name: provenance.scrub(value)
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and not any(part in name for part in _PRIVATE_SETTINGS)
    }
    speed = psutil.net_if_stats()[interface].speed
    network: dict[str, Any] = {
        "interface": interface,
        "counted_interface": counted,
        # As the driver says; virtual interfaces say nothing.
        "nominal_bits_per_s": speed * 10**6 or None,
        "nccl": settings,
    }
    commit = provenance.gather().commit
    return Description(address=address, commit=commit, network=network)


def _interface_with(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise ValueError(f"no network interface of this node has the address {address}")


def run(order: Order) -> Ended:
    """Launch the ranks and wait until they have ended, the input is closed, or time is over."""
    lifetimes.adopt_orphans()
    kills_before = lifetimes.out_of_memory_kills()
    own = dict(os.environ)
    node = order.node
    with lifetimes.folder() as folder:
        logs = order.launch.logs
        shared = (logs / order.marker).exists()
        if not shared:
            logs = folder / "logs"
            logs.mkdir()
        first = node.node * node.ranks_per_node
        board = Board(folder, range(first, first + node.ranks_per_node))
        launch = replace(order.launch, arguments=_arguments(order, folder), logs=logs)
        try:
            if node.node == 0 and not shared:
                raise ClusterError(f"node 0 does not see {order.launch.logs}: {_APART}")
            if node.node == 0:
                check_port(order.address, node.port)
            result = _launched(order, launch, board, folder / "temporary")
        except ClusterError as error:
            result = NodeResult(error=str(error))
        return Ended(
            result=result,
            reports=[
                replace(each, error=without_secrets(each.error, own)) for each in board.reports()
            ],
            now_ns=time.monotonic_ns(),
            logs={
                file.name: without_secrets(
                    file.read_bytes()[-_LONGEST_LOG:].decode("utf-8", errors="replace"), own
                )
                for file in ([] if shared else logs.glob("*.log"))
            },
            out_of_memory_kills=lifetimes.out_of_memory_kills() - kills_before,
        )


def _launched(order: Order, launch: Launch, board: Board, scratch: Path) -> NodeResult:
    """Run the ranks; returns how they ended, or an empty result if they were cut short."""
    interface = _interface_with(order.address)
    requested = {**order.node.environment, **launch.environment}
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        **passed_on(os.environ, named(requested)),
        **requested,
    }
    # The kernel shows this environment as the one that the agent was started with.
    os.environ.clear()
    os.environ.update(environment)
    node = replace(order.node, environment=environment, scratch=str(scratch))
    name = f"the agent of node {node.node}"
    agent = Started(get_context("spawn"), name, "serve", node, launch, board)
    try:
        deadline = time.monotonic() + launch.timeout_s
        heard = time.monotonic()
        while agent.result is None and time.monotonic() < min(deadline, heard + SILENCE_S):
            if 0 in wait([agent.connection, 0], _WATCH_INTERVAL_S):
                if not os.read(0, 1024):
                    break
                heard = time.monotonic()
            agent.collect()
        return agent.result or NodeResult()
    finally:
        agent.end()


def _arguments(order: Order, folder: Path) -> tuple[str, ...]:
    """The function's arguments; the runner's files among them are copied to ``folder``."""
    arguments: list[str] = []
    for argument in order.launch.arguments:
        if argument in order.files:
            copy = folder / f"argument{len(arguments)}"
            copy.write_text(order.files[argument], encoding="utf-8")
            argument = str(copy)
        arguments.append(argument)
    return tuple(arguments)


if __name__ == "__main__":
    main()
