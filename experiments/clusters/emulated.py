"""A cluster on this host: namespaces as nodes, a shaped link between them."""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from experiments.clusters import causes, lifetimes, namespaces, preload, privileges
from experiments.clusters.allocation import visible_gpus
from experiments.clusters.causes import Board
from experiments.clusters.interface import Cluster, ClusterError, Launch, Outcome, check_port
from experiments.clusters.launch import AGENT, Machine, Node, Started
from experiments.records import provenance
from experiments.records.abilities import ABILITIES, HIGHEST_RATE, LOWEST_RATE
from experiments.records.cell import ClusterSpec
from experiments.records.environment import named, passed_on

#: Seconds that the other ranks have to end by themselves after the first failure, ...
_GRACE_S = 2.0
#: ... and between two looks at the ranks.
_WATCH_INTERVAL_S = 0.1
#: The interface that leads to the other nodes (of the same group, where there are several), and
#: the one that leads to nodes of other groups: the same names on every node.
INTERFACE = "fcdp0"
TO_GROUPS = "fcdp1"
#: Bytes of the largest IP packet between nodes (jumbo frames, as in clusters).
MTU = 9000
#: 198.18.0.0/15 is set aside for benchmarks on isolated networks (RFC 2544): unlike the private
#: ranges it never holds the host's name server, which would make look-ups wait for an answer.
NETWORK = ipaddress.ip_network("198.18.0.0/15")

_FRAME = MTU + 14
_LOOPBACK_INDEX = 1


class EmulatedCluster(Cluster):
    """``spec.nodes`` nodes on this host, each a network namespace with a limited egress.

    With several ``spec.groups``, links between groups have a limit of their own. Where
    ``spec.cores`` says so each node has cores of its own: else a rank that waits gives its core to
    another node's, and waiting costs nothing.

    ``preload`` names the modules that the launch's function needs: they are imported once, and the
    ranks of every run are forked from the process that has imported them. They must not run
    tensor operations or use a GPU while they are imported.

    A context manager. ``__enter__`` removes what a killed parent left, imports and builds the
    network; it raises ``ClusterError`` if privileges, kernel features, modules or cores are
    missing. The calling script needs the ``if __name__ == "__main__"`` guard of
    ``multiprocessing``.
    """

    can = ABILITIES["emulated"]

    def __init__(self, spec: ClusterSpec, preload: Sequence[str] = ("torch",)) -> None:
        super().__init__(spec)
        self._groups = spec.groups
        self._own_cores = spec.cores == "own"
        self._port = spec.port
        self._preload = (AGENT, *preload)

    def __enter__(self) -> EmulatedCluster:
        privileges.require()
        self._cores = _dealt(provenance.cores(), self.nodes) if self._own_cores else None
        namespaces.remove_stale()
        self._context: ForkServerContext = preload.start(self._preload)
        self._network = Network(self.nodes, self._groups).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._network.__exit__()

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress for the next runs; see ``Network.shape``."""
        return self._network.shape(bits_per_s, to_groups)

    def run(self, launch: Launch) -> Outcome:
        """Call the launch's function on every rank, in fresh processes; see ``Cluster.run``.

        The ranks see those variables of this process that ``passed_on`` selects, the launch's,
        torchrun's, and ``FCDP_INTERFACE``: the interface to the other nodes, whose counters
        ``links.transmitted_bytes`` reads. ``FCDP_GROUP_INTERFACE`` is the one to other groups,
        where there are several. Each rank has a log ``rank<r>.log``, each node ``node<n>.log``.

        Raises ``ClusterError`` if the port is taken. Whatever is raised, no process is left.

        A process of ``extra`` runs on a machine of its own, whose link is limited like a node's;
        its log is named after it. It has all cores: nodes often leave none, and a switch without
        one would slow what it connects. It and the ranks find the address of each such process in
        ``FCDP_<NAME>``, and a secret of this launch in ``FCDP_RUN_SECRET``.
        """
        network, context = self._network, self._context
        namespaces.call_in(network.nodes[0], lambda: check_port(network.addresses[0], self._port))
        logs, extra = launch.logs.absolute(), launch.extra
        logs.mkdir(parents=True, exist_ok=True)
        launch = replace(launch, logs=logs)
        with ExitStack() as stack:
            folder = stack.enter_context(lifetimes.folder())
            board = Board(folder, range(self.nodes * self.ranks_per_node))
            if extra:
                stack.callback(network.withdraw)
            for each in extra:
                network.add(each.name, in_network=each.in_network)
            variables = self._variables(launch)
            beside = []
            for each in extra:
                machine = Machine(
                    namespace=network.beside[each.name][0],
                    environment=variables,
                    preload=self._preload,
                    scratch=str(folder / each.name),
                )
                log = logs / f"{each.name}.log"
                beside.append(Started(context, each.name, "serve_beside", machine, each.entry, log))
                stack.callback(beside[-1].end)
            agents = []
            for number, place in enumerate(network.nodes):
                node = Node(
                    namespace=place,
                    scratch=str(folder / f"node{number}"),
                    cores=self._cores[number] if self._cores else frozenset(),
                    node=number,
                    nodes=self.nodes,
                    ranks_per_node=self.ranks_per_node,
                    ranks_are_hosts=visible_gpus(os.environ) < self.ranks_per_node,
                    master_address=network.addresses[0],
                    port=self._port,
                    # Each node is a host to NCCL, which else would use shared memory between them.
                    environment={**variables, "NCCL_HOSTID": f"node{number}"},
                    preload=self._preload,
                )
                name = f"the agent of node {number}"
                agents.append(Started(context, name, "serve", node, launch, board))
                stack.callback(agents[-1].end)
            return _watch(agents, beside, board, launch.timeout_s)

    def _variables(self, launch: Launch) -> dict[str, str]:
        """The environment of a launch's processes, but for what torchrun adds."""
        network = self._network
        return {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **passed_on(os.environ, named(os.environ)),
            "FCDP_INTERFACE": INTERFACE,
            **({"FCDP_GROUP_INTERFACE": TO_GROUPS} if network.groups > 1 else {}),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            # Not InfiniBand, which no namespace limits.
            "NCCL_NET": "Socket",
            **launch.environment,
            "WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            # Addresses of the processes beside the ranks, and a secret that all share.
            **{
                f"FCDP_{name.upper()}": f"{address}:{self._port}"
                for name, (_, address) in network.beside.items()
            },
            **({"FCDP_RUN_SECRET": secrets.token_hex()} if launch.extra else {}),
        }


def _dealt(cores: Sequence[int], nodes: int) -> list[frozenset[int]]:
    """Each node's own cores, equally many. Raises ``ClusterError`` if there are too few."""
    each = len(cores) // nodes
    if not each:
        raise ClusterError(
            f"cores = 'own': {nodes} nodes need a core each, and there are {len(cores)}; allowed "
            "here is shared"
        )
    return [frozenset(cores[node * each :][:each]) for node in range(nodes)]


def _watch(
    agents: Sequence[Started], beside: Sequence[Started], board: Board, timeout_s: float
) -> Outcome:
    """Wait until all nodes are done, one has failed, or the time is over; return the outcome."""
    broken: str | None = None
    deadline = time.monotonic() + timeout_s
    kills_before = lifetimes.out_of_memory_kills()
    while running := [each for each in agents if each.result is None]:
        wait([each.connection for each in running], timeout=_WATCH_INTERVAL_S)
        for each in (*running, *beside):
            each.collect()
        now = time.monotonic()
        errors = (each.result.error for each in beside if each.result)
        broken = next(filter(None, errors), None)
        if broken or board.reports() or any(each.result and not each.result.ok for each in agents):
            deadline = min(deadline, now + _GRACE_S)
        if now > deadline:
            break
    results = {node: each.result for node, each in enumerate(agents) if each.result is not None}
    reports = board.reports()
    kills = lifetimes.out_of_memory_kills() - kills_before
    if broken and all(report.lost_peer for report in reports):
        return Outcome("failed", None, broken)
    ended = causes.outcome(results, reports, out_of_memory_kills=kills)
    if ended.state == "ok" and len(results) < len(agents):
        return Outcome("timeout", None, f"did not end within {timeout_s:g} s")
    return ended


class Network:
    """``nodes`` network namespaces, joined through veth pairs and a bridge in another one.

    With several ``groups``, of equally many consecutive nodes, there are two bridges: traffic to
    nodes of another group takes the second one, so that each kind of link has its own limit and
    counters.

    Nothing is created in the caller's namespace. A context manager: ``__enter__`` builds it,
    ``__exit__`` ends what still runs inside and removes it. Raises ``ClusterError`` if the
    kernel refuses.
    """

    def __init__(self, nodes: int, groups: int = 1) -> None:
        assert nodes % groups == 0, "groups have as many nodes each"
        prefix = lifetimes.new_prefix()
        self._switch = f"{prefix}-switch"
        #: Name of each node's namespace.
        self.nodes = [f"{prefix}-node{node}" for node in range(nodes)]
        #: IPv4 address of each node.
        self.addresses = [str(NETWORK[1 + node]) for node in range(nodes)]
        #: Namespaces and addresses of machines beside the nodes, by name.
        self.beside: dict[str, tuple[str, str]] = {}
        #: Those that are part of the network: in their place all others are limited, both ways.
        self._inside: set[str] = set()
        self._prefix = prefix
        self.groups = groups
        #: A node's interfaces to other nodes.
        self.interfaces = (INTERFACE, TO_GROUPS) if groups > 1 else (INTERFACE,)

    def __enter__(self) -> Network:
        try:
            namespaces.create(self._switch)
            with IPRoute(netns=self._switch) as switch:
                for interface in self.interfaces:
                    # Without the delay a new port would drop the first seconds of traffic.
                    bridge = {"kind": "bridge", "br_forward_delay": 0, "state": "up"}
                    switch.link("add", ifname=interface, **bridge)
            for node, name in enumerate(self.nodes):
                self._join(name, self.addresses[node], f"{node}")
        except BaseException as error:
            self.__exit__()
            if not isinstance(error, (OSError, NetlinkError)):
                raise
            raise ClusterError(
                f"cannot build the emulated network: {error}; it needs the kernel's network "
                "namespaces, veth and bridge"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        # A veth pair goes with either of its namespaces, so only these have to be removed.
        beside = (namespace for namespace, _ in self.beside.values())
        for name in (*beside, *self.nodes, self._switch):
            namespaces.remove(name)

    def add(self, name: str, *, in_network: bool) -> None:
        """Add a machine beside the nodes; ``in_network``: as a part of the network itself.

        Raises ``ClusterError`` if the kernel refuses.
        """
        assert self.groups == 1, "it would be in no group"
        namespace = f"{self._prefix}-beside-{name}"
        address = str(NETWORK[1 + len(self.nodes) + len(self.beside)])
        self.beside[name] = namespace, address
        if in_network:
            self._inside.add(name)
        try:
            self._join(namespace, address, name)
        except (OSError, NetlinkError) as error:
            raise ClusterError(f"cannot join {name} to the network: {error}") from error

    def withdraw(self) -> None:
        """Remove the machines beside the nodes, and the limits that they needed."""
        for name, (namespace, _) in self.beside.items():
            namespaces.remove(namespace)
            self._inside.discard(name)
        self.beside.clear()
        for node in range(len(self.nodes)):
            _shape_link(self._switch, f"{INTERFACE}-{node}", None)

    def _join(self, namespace: str, address: str, port: str) -> None:
        """Make a machine with this address, and join it to a port of each bridge."""
        namespaces.create(namespace)
        with IPRoute(netns=self._switch) as switch:
            for interface in self.interfaces:
                name = f"{interface}-{port}"
                peer = {"ifname": interface, "net_ns_fd": namespace, "mtu": MTU}
                switch.link("add", ifname=name, kind="veth", mtu=MTU, peer=peer)
                bridge = _index(switch, interface)
                switch.link("set", index=_index(switch, name), master=bridge, state="up")
        namespaces.call_in(namespace, self._settle_protocols)
        with IPRoute(netns=namespace) as route:
            index = _index(route, INTERFACE)
            # Made from the IP address: ARP caches stay right where another machine takes it over.
            hardware = ipaddress.ip_address(address).packed.hex(":")
            route.link("set", index=index, address=f"02:00:{hardware}")
            route.addr("add", index=index, address=address, prefixlen=NETWORK.prefixlen)
            for each in (_LOOPBACK_INDEX, *(_index(route, name) for name in self.interfaces)):
                route.link("set", index=each, state="up")
            size = len(self.nodes) // self.groups
            group = self.nodes.index(namespace) // size if self.groups > 1 else 0
            for node, host in enumerate(self.addresses):
                if node // size != group:
                    index = _index(route, TO_GROUPS)
                    route.route("add", dst=f"{host}/32", oif=index, scope="link", prefsrc=address)

    def _settle_protocols(self) -> None:
        """Make nodes behave alike on every host, where /proc is writable.

        Without IPv6, router and neighbour discovery stay out of the byte counters. The host's
        congestion control may be one that probes and paces (BBR), which on a link of a few Mbit/s
        costs bandwidth in an exchange of both directions; Reno never meets a loss here, and every
        namespace may choose it.
        """
        settings = {f"ipv6/conf/{name}/disable_ipv6": "1" for name in self.interfaces}
        for name, value in {**settings, "ipv4/tcp_congestion_control": "reno"}.items():
            with suppress(OSError):
                Path("/proc/sys/net", name).write_text(f"{value}\n")

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress to ``bits_per_s``, or lift the limit with ``None``.

        With several groups, this limits links inside a group, and ``to_groups`` those between them.
        Returns what the kernel reports to have set: the rate in bits per second, the burst and the
        queue's limit in bytes, and the nodes' TCP congestion control; the same for ``to_groups``
        under that name. Raises ``ValueError`` for a rate that cannot be had and ``ClusterError``
        if the kernel has no token bucket.
        """
        rates = {"inter_bandwidth": bits_per_s, "inter_group_bandwidth": to_groups}
        for name, rate in rates.items():
            if rate is not None and not LOWEST_RATE <= rate <= HIGHEST_RATE:
                raise ValueError(
                    f"{name}_bits_per_s = {rate}: allowed are {LOWEST_RATE} to {HIGHEST_RATE} "
                    "bits per second, or None for no limit"
                )
        assert to_groups is None or self.groups > 1, "there is one group only"
        try:
            limits = [
                [_shape_link(name, interface, rate) for name in self.nodes]
                for interface, rate in zip(self.interfaces, rates.values(), strict=False)
            ]
            outside = [name for name in self.beside if name not in self._inside]
            for name in outside:
                _shape_link(self.beside[name][0], INTERFACE, bits_per_s)
            # Where a machine is part of the network, what the others receive is limited alike:
            # its own link stands for one link to each of them.
            if self._inside:
                for port in (*range(len(self.nodes)), *outside):
                    _shape_link(self._switch, f"{INTERFACE}-{port}", bits_per_s)
        except NetlinkError as error:
            raise ClusterError(
                f"cannot limit the nodes' egress: {error}; it needs the kernel's token bucket "
                "(module sch_tbf)"
            ) from error
        setting = Path("/proc/sys/net/ipv4/tcp_congestion_control")
        congestion_control = namespaces.call_in(self.nodes[0], setting.read_text).strip()
        inside, *between = (of_nodes[0] for of_nodes in limits)
        others = {"to_groups": between[0]} if between else {}
        both = {"both_directions": True} if self._inside else {}
        return {**inside, "congestion_control": congestion_control, **others, **both}


def _shape_link(name: str, interface: str, bits_per_s: int | None) -> dict[str, Any]:
    with IPRoute(netns=name) as route:
        index = _index(route, interface)

        def buckets() -> list[Any]:
            queues = route.get_qdiscs(index=index)
            return [queue for queue in queues if queue.get_attr("TCA_KIND") == "tbf"]

        # A new bucket rather than a changed one: each cell starts with the same full burst.
        if buckets():
            route.tc("del", index=index, parent=TC_H_ROOT)
        if bits_per_s is None:
            return {"mtu_bytes": MTU, "qdisc": None}
        rate = bits_per_s // 8
        # A fifth of a second of the link, and a full TCP window, may wait for tokens. So deep that
        # nothing is dropped: links of a cluster hold senders back rather than lose packets.
        limit = max(rate // 5, 4 * 1024 * 1024)
        burst = burst_bytes(bits_per_s)
        route.tc("add", "tbf", index=index, rate=rate, burst=burst, limit=limit)
        parameters = buckets()[0].get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
        return {
            "mtu_bytes": MTU,
            "qdisc": "tbf",
            "rate_bits_per_s": 8 * parameters["rate"],
            # The kernel keeps the burst as the time it takes, in ticks of 64 ns.
            "burst_bytes": round(parameters["buffer"] * 64e-9 * parameters["rate"]),
            "limit_bytes": parameters["limit"],
        }


def burst_bytes(bits_per_s: int) -> int:
    """Size of the token bucket in bytes: what may leave at once after a pause.

    Large enough that a timer that fires up to 5 ms late costs no bandwidth, and that a few whole
    frames fit (the kernel cuts the larger packets of segmentation offload into frames). Small
    enough against a step's traffic: at 10 Mbit/s it is 36 kB, 29 ms of the link.
    """
    return max(4 * _FRAME, bits_per_s // 8 // 200)


def _index(route: IPRoute, interface: str) -> int:
    (index,) = route.link_lookup(ifname=interface)
    return int(index)
