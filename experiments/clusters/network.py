"""The emulated network: a namespace per node, a switch, egress limited by a token bucket."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from experiments.clusters import lifetimes, namespaces
from experiments.clusters.interface import ClusterError

#: The interface of a node that leads to the other nodes; the same name inside every node.
INTERFACE = "fcdp0"
#: Bytes of the largest IP packet between nodes (jumbo frames, as in clusters).
MTU = 9000
#: 198.18.0.0/15 is set aside for benchmarks on isolated networks (RFC 2544): unlike the private
#: ranges it never holds the host's name server, which would make look-ups wait for an answer.
NETWORK = ipaddress.ip_network("198.18.0.0/15")

#: Bits per second between which shaping works: below, a frame takes seconds; above, the rate in
#: bytes per second no longer fits the 32 bits of the kernel's message.
LOWEST_RATE = 10_000
HIGHEST_RATE = 8 * (2**32 - 1)

_FRAME = MTU + 14
_LOOPBACK_INDEX = 1


class Network:
    """``nodes`` network namespaces, joined through veth pairs and a bridge in one of its own.

    Nothing is created in the caller's namespace. A context manager: ``__enter__`` builds it,
    ``__exit__`` ends what still runs inside and removes it. Raises ``ClusterError`` if the
    kernel refuses.
    """

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise ValueError(f"nodes = {nodes}: allowed are whole numbers from 1")
        prefix = lifetimes.new_prefix()
        self._switch = f"{prefix}-switch"
        #: Name of each node's namespace.
        self.nodes = [f"{prefix}-node{node}" for node in range(nodes)]
        #: IPv4 address of each node.
        self.addresses = [str(NETWORK[1 + node]) for node in range(nodes)]

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
            # Without the delay a new port would drop the first seconds of traffic.
            route.link("add", ifname="switch", kind="bridge", br_forward_delay=0, state="up")
            (switch,) = route.link_lookup(ifname="switch")
            for node, name in enumerate(self.nodes):
                peer = {"ifname": INTERFACE, "net_ns_fd": name, "mtu": MTU}
                route.link("add", ifname=f"port{node}", kind="veth", mtu=MTU, peer=peer)
                (port,) = route.link_lookup(ifname=f"port{node}")
                route.link("set", index=port, master=switch, state="up")
        for name, address in zip(self.nodes, self.addresses, strict=True):
            namespaces.call_in(name, _settle_protocols)
            with IPRoute(netns=name) as route:
                index = _interface(route)
                route.addr("add", index=index, address=address, prefixlen=NETWORK.prefixlen)
                route.link("set", index=index, state="up")
                route.link("set", index=_LOOPBACK_INDEX, state="up")

    def _remove(self) -> None:
        # A veth pair ends with either of its ends, so nothing but the names has to go.
        for name in (*self.nodes, self._switch):
            namespaces.remove(name)

    def shape(self, bits_per_s: int | None) -> dict[str, Any]:
        """Limit every node's egress to ``bits_per_s``, or lift the limit with ``None``.

        Returns what the kernel reports to have set: the rate in bits per second, the burst and the
        queue's limit in bytes, and the nodes' TCP congestion control. Raises ``ValueError`` for a
        rate that cannot be had and ``ClusterError`` if the kernel has no token bucket.
        """
        if bits_per_s is not None and not LOWEST_RATE <= bits_per_s <= HIGHEST_RATE:
            raise ValueError(
                f"inter_bandwidth_bits_per_s = {bits_per_s}: allowed are {LOWEST_RATE} to "
                f"{HIGHEST_RATE} bits per second, or None for no limit"
            )
        try:
            settings = [self._shape_node(name, bits_per_s) for name in self.nodes]
        except NetlinkError as error:
            raise ClusterError(
                f"cannot limit the nodes' egress: {error}; it needs the kernel's token bucket "
                "(module sch_tbf)"
            ) from error
        congestion_control = namespaces.call_in(self.nodes[0], _congestion_control)
        return {**settings[0], "congestion_control": congestion_control}

    def _shape_node(self, name: str, bits_per_s: int | None) -> dict[str, Any]:
        with IPRoute(netns=name) as route:
            index = _interface(route)
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


def _interface(route: IPRoute) -> int:
    (index,) = route.link_lookup(ifname=INTERFACE)
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


def _settle_protocols() -> None:
    """Make every machine's nodes behave alike, where /proc is writable.

    Router and neighbour discovery stay out of the byte counters. The host's congestion control
    may be one that probes and paces (BBR), which on a link of a few Mbit/s costs bandwidth in an
    exchange of both directions; Reno never meets a loss here, and every namespace may choose it.
    """
    _write_setting(f"ipv6/conf/{INTERFACE}/disable_ipv6", "1")
    _write_setting("ipv4/tcp_congestion_control", "reno")


def _write_setting(name: str, value: str) -> None:
    with suppress(OSError):
        Path(f"/proc/sys/net/{name}").write_text(f"{value}\n")


def _congestion_control() -> str:
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
