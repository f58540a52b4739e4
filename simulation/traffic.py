"""Latency and bandwidth of the exchanges that gathers and reductions are made of.

``nbytes`` is always the whole buffer: what an all-gather yields, what a reduce-scatter takes. A
flat ring over all ranks has one edge out of each node, over which all but one rank's part passes;
a hierarchy sends across nodes only what a node does not have. Each all-gather has its mirror image
in a reduce-scatter of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulation.hardware import Hardware


@dataclass(frozen=True)
class Traffic:
    """Bytes that one exchange sends, and its messages one after the other."""

    #: Bytes out of the busiest node, all its ranks together.
    inter_node_bytes: float = 0.0
    #: Bytes inside a node, of all its ranks together and of the rank that sends most.
    intra_node_bytes: float = 0.0
    intra_rank_bytes: float = 0.0
    inter_messages: float = 0
    intra_messages: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        """The traffic of two exchanges, one after the other."""
        return Traffic(
            self.inter_node_bytes + other.inter_node_bytes,
            self.intra_node_bytes + other.intra_node_bytes,
            self.intra_rank_bytes + other.intra_rank_bytes,
            self.inter_messages + other.inter_messages,
            self.intra_messages + other.intra_messages,
        )

    def __truediv__(self, steps: int) -> Traffic:
        """What falls to each of so many steps, which have one such exchange together."""
        return Traffic(
            self.inter_node_bytes / steps,
            self.intra_node_bytes / steps,
            self.intra_rank_bytes / steps,
            self.inter_messages / steps,
            self.intra_messages / steps,
        )

    def latency_seconds(self, hardware: Hardware) -> float:
        """Seconds of all messages' latencies, one after the other."""
        return (
            self.inter_messages * hardware.inter_latency_seconds
            + self.intra_messages * hardware.intra_latency_seconds
        )


def flat(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-gather or reduce-scatter as one ring over all ranks, as NCCL and gloo build it."""
    world = nodes * ranks_per_node
    passed = (world - 1) / world * nbytes
    return Traffic(
        inter_node_bytes=passed if nodes > 1 else 0.0,
        intra_node_bytes=passed * (ranks_per_node - (nodes > 1)),
        intra_rank_bytes=passed if ranks_per_node > 1 else 0.0,
        # A part goes round all ranks; n of the edges that it passes lead to another node.
        inter_messages=min(nodes, world - 1) if nodes > 1 else 0,
        intra_messages=max(world - 1 - nodes, 0) if nodes > 1 else world - 1,
    )


def inter_node(nbytes: float, nodes: int) -> Traffic:
    """An inter-node all-gather or reduce-scatter, among ranks of equal local rank."""
    return Traffic(inter_node_bytes=(nodes - 1) / nodes * nbytes, inter_messages=nodes - 1)


def intra_node(nbytes: float, ranks_per_node: int) -> Traffic:
    """An intra-node all-gather or reduce-scatter."""
    passed = (ranks_per_node - 1) / ranks_per_node * nbytes
    return Traffic(
        intra_node_bytes=ranks_per_node * passed,
        intra_rank_bytes=passed,
        intra_messages=ranks_per_node - 1,
    )


def hierarchical(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-gather or reduce-scatter in both halves, one after the other."""
    return inter_node(nbytes, nodes) + intra_node(nbytes, ranks_per_node)


def flat_all_reduce(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-reduce: a reduce-scatter and an all-gather round the same ring."""
    half = flat(nbytes, nodes, ranks_per_node)
    return half + half


def hierarchical_all_reduce(nbytes: float, nodes: int, ranks_per_node: int) -> Traffic:
    """An all-reduce: inside the node, 1/L of it across nodes, and back."""
    half = hierarchical(nbytes, nodes, ranks_per_node)
    return half + half
