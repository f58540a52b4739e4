"""The emulated network: a namespace per node, a switch, egress limited by a token bucket."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from experiments.clusters import lifetimes, namespaces
from experiments.clusters.interface import ClusterError
from experiments.records.abilities import HIGHEST_RATE, LOWEST_RATE

#: The interface of a node that leads to the other nodes, or to those of its group where there are
#: several; and the one to nodes of other groups. The same names inside every node.
INTERFACE = "fcdp0"
TO_GROUPS = "fcdp1"
#: Bytes of the largest IP packet between nodes (jumbo frames, as in clusters).
MTU = 9000
#: 198.18.0.0/15 is set aside for benchmarks on isolated networks (RFC 2544): unlike the private
#: ranges it never holds the host's name server, which would make look-ups wait for an answer.
NETWORK = ipaddress.ip_network("198.18.0.0/15")

_FRAME = MTU + 14
_LOOPBACK_INDEX = 1


class Network:
    """``nodes`` network namespaces, joined through veth pairs and a bridge in one of its own.

    With several ``groups``, of as many consecutive nodes each, there are two such bridges: what
    goes to a node of another group takes the second one, so that each kind of link has a limit of
    its own, and counters.

    Nothing is created in the caller's namespace. A context manager: ``__enter__`` builds it,
    ``__exit__`` ends what still runs inside and removes it. Raises ``ClusterError`` if the
    kernel refuses.
    """

    def __init__(self, nodes: int, groups: int = 1) -> None:
        if nodes < 1:
            raise ValueError(f"nodes = {nodes}: allowed are whole numbers from 1")
        assert nodes % groups == 0, "groups have as many nodes each"
        prefix = lifetimes.new_prefix()
        self._switch = f"{prefix}-switch"
        #: Name of each node's namespace.
        self.nodes = [f"{prefix}-node{node}" for node in range(nodes)]
        #: IPv4 address of each node.
        self.addresses = [str(NETWORK[1 + node]) for node in range(nodes)]
        #: Namespaces and addresses of machines beside the nodes, by name.
        self.beside: dict[str, tuple[str, str]] = {}
        #: Those that are parts of the network, which links in both directions limit.
        self._inside: set[str] = set()
        self._prefix = prefix
        self.groups = groups
        #: A node's interfaces to other nodes.
        self.interfaces = (INTERFACE, TO_GROUPS) if groups > 1 else (INTERFACE,)

    def __enter__(self) -> Network:
        try:
            self._build()
        except (OSError, NetlinkError) as error:
            self._remove()
            raise ClusterError(
                f"cannot build the emulated network: {error}; it needs the kernel's network "
                "namespaces, veth and bridge"
            ) from error
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _build(self) -> None:
        for name in (self._switch, *self.nodes):
            namespaces.create(name)
        with IPRoute(netns=self._switch) as route:
            for interface in self.interfaces:
                self._join(route, interface)
        for name, address in zip(self.nodes, self.addresses, strict=True):
            self._settle(name, address)

    def add(self, name: str, *, in_network: bool) -> None:
        """Join a machine more, beside the nodes; ``in_network``: a part of the network itself.

        Raises ``ClusterError`` if the kernel refuses.
        """
        assert self.groups == 1, "it would be in no group"
        namespace = f"{self._prefix}-beside-{name}"
        address = str(NETWORK[1 + len(self.nodes) + len(self.beside)])
        self.beside[name] = namespace, address
        if in_network:
            self._inside.add(name)
        try:
            namespaces.create(namespace)
            with IPRoute(netns=self._switch) as route:
                self._plug(route, INTERFACE, f"{INTERFACE}-{name}", namespace)
            self._settle(namespace, address)
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

    def _settle(self, namespace: str, address: str) -> None:
        namespaces.call_in(namespace, self._settle_protocols)
        with IPRoute(netns=namespace) as route:
            self._connect(route, address)

    def _join(self, route: IPRoute, interface: str) -> None:
        """Give every node this interface, and join them all by a bridge."""
        # Without the delay a new port would drop the first seconds of traffic.
        route.link("add", ifname=interface, kind="bridge", br_forward_delay=0, state="up")
        for node, name in enumerate(self.nodes):
            self._plug(route, interface, f"{interface}-{node}", name)

    def _plug(self, route: IPRoute, interface: str, port: str, namespace: str) -> None:
        """Give a machine this interface, which leads to a port of the bridge of the same name."""
        peer = {"ifname": interface, "net_ns_fd": namespace, "mtu": MTU}
        route.link("add", ifname=port, kind="veth", mtu=MTU, peer=peer)
        route.link("set", index=_index(route, port), master=_index(route, interface), state="up")

    def _connect(self, route: IPRoute, own: str) -> None:
        """Give a machine its address, and its routes to nodes of other groups."""
        index = _index(route, INTERFACE)
        route.addr("add", index=index, address=own, prefixlen=NETWORK.prefixlen)
        for each in (_LOOPBACK_INDEX, *(_index(route, name) for name in self.interfaces)):
            route.link("set", index=each, state="up")
        if self.groups > 1:
            there, size = _index(route, TO_GROUPS), len(self.nodes) // self.groups
            node = self.addresses.index(own)
            for other, address in enumerate(self.addresses):
                if other // size != node // size:
                    route.route("add", dst=f"{address}/32", oif=there, scope="link", prefsrc=own)

    def _settle_protocols(self) -> None:
        """Make every machine's nodes behave alike, where /proc is writable.

        Router and neighbour discovery stay out of the byte counters. The host's congestion control
        may be one that probes and paces (BBR), which on a link of a few Mbit/s costs bandwidth in
        an exchange of both directions; Reno never meets a loss here, and every namespace may
        choose it.
        """
        for interface in self.interfaces:
            _write_setting(f"ipv6/conf/{interface}/disable_ipv6", "1")
        _write_setting("ipv4/tcp_congestion_control", "reno")

    def _remove(self) -> None:
        # A veth pair ends with either of its ends, so nothing but the names has to go.
        beside = (namespace for namespace, _ in self.beside.values())
        for name in (*beside, *self.nodes, self._switch):
            namespaces.remove(name)

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        """Limit every node's egress to ``bits_per_s``, or lift the limit with ``None``.

        Of several groups that is to nodes of the own one, and ``to_groups`` to all others.
        Returns what the kernel reports to have set: the rate in bits per second, the burst and the
        queue's limit in bytes, and the nodes' TCP congestion control; the same of ``to_groups``
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
            found = [
                _shape(self.nodes, interface, rate)
                for interface, rate in zip(self.interfaces, rates.values(), strict=False)
            ]
            others_too = self._shape_beside(bits_per_s)
        except NetlinkError as error:
            raise ClusterError(
                f"cannot limit the nodes' egress: {error}; it needs the kernel's token bucket "
                "(module sch_tbf)"
            ) from error
        congestion_control = namespaces.call_in(self.nodes[0], _congestion_control)
        inside, *between = found
        others = {"to_groups": between[0]} if between else {}
        return {**inside, "congestion_control": congestion_control, **others, **others_too}

    def _shape_beside(self, bits_per_s: int | None) -> dict[str, Any]:
        """Limit the links of machines beside the nodes.

        Where one is a part of the network, what the others receive is limited alike: its own link
        stands for as many as there are others.
        """
        outside = {name: where for name, where in self.beside.items() if name not in self._inside}
        for namespace, _ in outside.values():
            _shape_link(namespace, INTERFACE, bits_per_s)
        if not self._inside:
            return {}
        for port in (*range(len(self.nodes)), *outside):
            _shape_link(self._switch, f"{INTERFACE}-{port}", bits_per_s)
        return {"both_directions": True}


def _shape(nodes: Sequence[str], interface: str, bits_per_s: int | None) -> dict[str, Any]:
    """Limit an interface of all nodes; returns what the first one's is."""
    found = [_shape_link(name, interface, bits_per_s) for name in nodes]
    return found[0]


def _shape_link(name: str, interface: str, bits_per_s: int | None) -> dict[str, Any]:
    with IPRoute(netns=name) as route:
        index = _index(route, interface)
        # A new bucket rather than a changed one: each cell starts with the same full burst.
        if _bucket(route, index) is not None:
            route.tc("del", index=index, parent=TC_H_ROOT)
        if bits_per_s is not None:
            rate = bits_per_s // 8
            burst = burst_bytes(bits_per_s)
            route.tc("add", "tbf", index=index, rate=rate, burst=burst, limit=_limit(rate))
        return {"mtu_bytes": MTU, **_describe(_bucket(route, index))}


def burst_bytes(bits_per_s: int) -> int:
    """Size of the token bucket in bytes: what may leave at once after a pause.

    Large enough that a timer that fires up to 5 ms late costs no bandwidth, and that a few whole
    frames fit (the kernel cuts the larger packets of segmentation offload into frames). Small
    enough against a step's traffic: at 10 Mbit/s it is 36 kB, 29 ms of the link.
    """
    return max(4 * _FRAME, bits_per_s // 8 // 200)


def _limit(rate: int) -> int:
    """Bytes that may wait for tokens: a fifth of a second of the link, and a full TCP window.

    Deep enough that nothing is dropped: links between nodes of a cluster hold senders back
    rather than lose packets.
    """
    return max(rate // 5, 4 * 1024 * 1024)


def _index(route: IPRoute, interface: str) -> int:
    (index,) = route.link_lookup(ifname=interface)
    return int(index)


def _bucket(route: IPRoute, index: int) -> Any | None:
    """The parameters of an interface's token bucket; ``None`` if it has none."""
    for qdisc in route.get_qdiscs(index=index):
        if qdisc.get_attr("TCA_KIND") == "tbf":
            return qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
    return None


def _describe(bucket: Any | None) -> dict[str, Any]:
    if bucket is None:
        return {"qdisc": None}
    rate = bucket["rate"]
    # The kernel keeps the burst as the time it takes, in ticks of 64 ns.
    burst = round(bucket["buffer"] * 64e-9 * rate)
    return {
        "qdisc": "tbf",
        "rate_bits_per_s": 8 * rate,
        "burst_bytes": burst,
        "limit_bytes": bucket["limit"],
    }


def _write_setting(name: str, value: str) -> None:
    with suppress(OSError):
        Path(f"/proc/sys/net/{name}").write_text(f"{value}\n")


def _congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
