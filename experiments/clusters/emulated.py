"""A cluster on this host: namespaces as nodes, a shaped link between them, torchelastic inside."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from baselines.description import ExtraProcess
from experiments.clusters import causes, lifetimes, namespaces, preload, privileges
from experiments.clusters.causes import Board
from experiments.clusters.counters import out_of_memory_kills
from experiments.clusters.interface import ClusterError, Outcome
from experiments.clusters.launch import (
    AGENT,
    Launch,
    Machine,
    Node,
    Started,
    split,
    start_agent,
)
from experiments.clusters.network import INTERFACE, TO_GROUPS, Network
from experiments.records.abilities import ABILITIES
from experiments.records.cell import ClusterSpec

#: Seconds that the other ranks have to end by themselves after the first failure, ...
_GRACE_S = 2.0
#: ... and between two looks at the ranks.
_WATCH_INTERVAL_S = 0.1


class EmulatedCluster:
    """``spec.nodes`` nodes on this host, each a network namespace with a limited egress.

    With several ``spec.groups`` links between groups are limited apart from those inside.

    ``preload`` names the modules that the launch's function needs: they are imported once, and the
    ranks of every run are forked from the process that has imported them. They must not run
    tensor operations nor use a GPU while they are imported.

    A context manager. ``__enter__`` removes what a killed parent left, imports and builds the
    network; it raises ``ClusterError`` if privileges, kernel features or modules are missing. The
    calling script needs the ``if __name__ == "__main__"`` guard of ``multiprocessing``.
    """

    can = ABILITIES["emulated"]

    def __init__(self, spec: ClusterSpec, preload: Sequence[str] = ("torch",)) -> None:
        self.nodes = spec.nodes
        self._groups = spec.groups
        self.ranks_per_node = spec.ranks_per_node
        self._port = spec.port
        self._preload = (AGENT, *preload)
        self._network: Network | None = None
        self._context: ForkServerContext | None = None

    def __enter__(self) -> EmulatedCluster:
        privileges.require()
        namespaces.remove_stale()
        self._context = preload.start(self._preload)
        self._network = Network(self.nodes, self._groups).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._network is not None:
            self._network.__exit__()
            self._network = None

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress to ``bits_per_s`` (``None``: no limit) for the next runs.

        Of several groups that is inside of each, and ``to_groups`` between them. Returns what the
        kernel has set: ``qdisc``, ``rate_bits_per_s``, ``burst_bytes``, ``limit_bytes`` (the
        queue) and ``mtu_bytes``, and the same for ``to_groups``. Raises ``ValueError`` for a rate
        that cannot be had.
        """
        return self._built()[0].shape(bits_per_s, to_groups)

    def run(
        self,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        extra: Sequence[ExtraProcess] = (),
    ) -> Outcome:
        """Call ``entry`` on every rank, in fresh processes; see ``Cluster.run``.

        The ranks see this process's environment and ``environment``, what torchrun sets, and
        ``FCDP_INTERFACE``, the interface to the other nodes, whose counters
        ``counters.transmitted_bytes`` reads; ``FCDP_GROUP_INTERFACE`` is that to other groups where
        there are several. ``logs`` gets one ``rank<r>.log`` per
        rank and one ``node<n>.log`` per node. A launch that does not end within ``timeout_s``
        seconds is ended.

        Raises ``ClusterError`` if the port is taken, and ``ValueError`` for an ``entry`` that is
        not of the form "package.module:function". Whatever is raised, no process is left.

        A process of ``extra`` is on a machine of its own, whose link is limited like a node's; its
        log has its name. It and the ranks find the address of each in ``FCDP_<NAME>``, and a
        secret of this launch in ``FCDP_RUN_SECRET``.
        """
        network, context = self._built()
        split(entry)
        self._check_port(network)
        logs = logs.absolute()
        logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            folder = stack.enter_context(lifetimes.folder())
            board = Board(folder, range(self.nodes * self.ranks_per_node))
            board.create()
            launch = Launch(entry, tuple(arguments), logs, board)
            if extra:
                stack.callback(network.withdraw)
            for each in extra:
                network.add(each.name, in_network=each.in_network)
            told: dict[str, Any] = {
                "environment": self._variables(network, environment),
                "secret": secrets.token_hex() if extra else None,
                "preload": self._preload,
            }
            beside = []
            for each in extra:
                place, scratch = network.beside[each.name][0], str(folder / each.name)
                machine = Machine(namespace=place, scratch=scratch, **told)
                log = logs / f"{each.name}.log"
                beside.append(Started(context, each.name, "serve_beside", machine, each.entry, log))
                stack.callback(beside[-1].end)
            agents = []
            for number, (place, address) in enumerate(
                zip(network.nodes, network.addresses, strict=True)
            ):
                node = Node(
                    namespace=place,
                    scratch=str(folder / f"node{number}"),
                    node=number,
                    nodes=self.nodes,
                    ranks_per_node=self.ranks_per_node,
                    address=address,
                    master_address=network.addresses[0],
                    port=self._port,
                    timeout_s=timeout_s,
                    **told,
                )
                agents.append(start_agent(context, node, launch))
                stack.callback(agents[-1].end)
            return _watch(agents, beside, board, timeout_s)

    def _built(self) -> tuple[Network, ForkServerContext]:
        if self._network is None or self._context is None:
            raise ClusterError("the cluster is not built: use it inside its `with` block")
        return self._network, self._context

    def _variables(self, network: Network, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of a launch's processes, but for what torchrun adds."""
        return {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "FCDP_INTERFACE": INTERFACE,
            **({"FCDP_GROUP_INTERFACE": TO_GROUPS} if network.groups > 1 else {}),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            **environment,
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            # Where processes beside the ranks are.
            **{
                f"FCDP_{name.upper()}": f"{address}:{self._port}"
                for name, (_, address) in network.beside.items()
            },
        }

    def _check_port(self, network: Network) -> None:
        address = network.addresses[0]

        def bind() -> None:
            with socket.socket() as probe:
                # A port whose last connections merely wait to expire is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, self._port))

        try:
            namespaces.call_in(network.nodes[0], bind)
        except OSError as error:
            raise ClusterError(
                f"the ranks cannot meet at {address} port {self._port}: {error.strerror}; "
                "end what listens there, or choose another port in the cluster's settings"
            ) from error


def _watch(
    agents: Sequence[Started], beside: Sequence[Started], board: Board, timeout_s: float
) -> Outcome:
    """Wait until all nodes are done, one has failed, or the time is over; return the outcome."""
    broken: str | None = None
    deadline = time.monotonic() + timeout_s
    kills_before = out_of_memory_kills()
    while running := [each for each in agents if each.result is None]:
        wait([each.connection for each in running], timeout=_WATCH_INTERVAL_S)
        for each in (*running, *beside):
            each.collect()
        now = time.monotonic()
        said = (each.result.error for each in beside if each.result)
        broken = next(filter(None, said), None)
        if broken or board.reports() or any(each.result and not each.result.ok for each in agents):
            deadline = min(deadline, now + _GRACE_S)
        if now > deadline:
            break
    results = {node: each.result for node, each in enumerate(agents) if each.result is not None}
    reports = board.reports()
    kills = out_of_memory_kills() - kills_before
    if broken and all(report.lost_peer for report in reports):
        return Outcome("failed", None, broken)
    ended = causes.outcome(results, reports, out_of_memory_kills=kills)
    if ended.state == "ok" and len(results) < len(agents):
        return Outcome("timeout", None, f"did not end within {timeout_s:g} s")
    return ended
