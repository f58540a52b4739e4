"""The exchanges that everything here is made of, moving no byte more than needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fcdp.topology import Topology

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """An exchange under way; ``wait`` orders the current stream after it (blocks on the CPU)."""

    def wait(self) -> object: ...


def swap(
    received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send ``sent[i]`` to the group's rank i and receive ``received[i]`` from it, for all i there.

    A rank's own index is left out. Needs no buffer of its own.
    """
    # All receives come first. A gloo rank announces on the same connection that it is ready to
    # receive; were the announcement queued behind its own data, a full-duplex link would carry
    # one direction at a time.
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensors in ((dist.irecv, received), (dist.isend, sent))
        for peer, tensor in tensors.items()
        if peer != group.rank()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def any_rank(flags: torch.Tensor, topology: Topology) -> None:
    """In place, set each of ``flags`` (uint8, on the host) that is set on any rank.

    Two messages long, first inside the node and then across, where an all-reduce is 2·(W−1).
    """
    node, local_rank, ranks = topology.node, topology.local_rank, topology.ranks_per_node
    inside = [node * ranks + other for other in range(ranks)]
    across = [other * ranks + local_rank for other in range(topology.nodes)]
    for peers in (inside, across):
        received = {peer: torch.empty_like(flags) for peer in peers if peer != topology.rank}
        for work in swap(received, dict.fromkeys(received, flags), topology.control):
            work.wait()
        for other in received.values():
            flags |= other


def all_gather(output: torch.Tensor, group: dist.ProcessGroup) -> Sequence[Pending]:
    """Gather in place: each of the group's g ranks holds its part of ``output`` (g·s) already.

    Each rank sends (g−1)·s elements.
    """
    parts = dict(enumerate(output.view(group.size(), -1)))
    own = parts[group.rank()]
    if _over_gloo(output, group):  # whose own all-gather copies through buffers of its own
        return swap(parts, dict.fromkeys(parts, own), group)
    return [_all_gather(output, own, group=group, async_op=True)]


def reduce_scatter(
    output: torch.Tensor,
    buffer: torch.Tensor,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
) -> Pending:
    """Reduce ``buffer`` (g·s) over the group's g ranks; this rank's part (s) goes to ``output``.

    Each rank sends (g−1)·s elements. Over gloo ``op`` must be a sum.
    """
    if _over_gloo(buffer, group):
        assert op == dist.ReduceOp.SUM, f"{op} over gloo: the engine asks FSDP2 for sums"
        return _SwapAndAdd(output, buffer, group)
    return _reduce_scatter(output, buffer, op=op, group=group, async_op=True)


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and "gloo" in dist.get_backend(group)


class _SwapAndAdd:
    """Reduce-scatter over gloo, whose own is an all-reduce that sends twice the minimum."""

    def __init__(
        self, output: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        parts = dict(enumerate(buffer.view(group.size(), -1)))
        received = {peer: torch.empty_like(output) for peer in parts if peer != group.rank()}
        self._output = output
        self._works = swap(received, parts, group)
        # In rank order on every rank, whatever the order of arrival.
        self._summands = [received.get(peer, part) for peer, part in parts.items()]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        first, second, *more = self._summands
        torch.add(first, second, out=self._output)
        for summand in more:
            self._output.add_(summand)
