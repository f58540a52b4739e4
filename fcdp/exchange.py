"""The exchanges that everything here is made of, moving no byte more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fcdp.topology import Topology

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """An exchange under way; ``wait`` orders the current stream after it (blocks on the CPU)."""

    def wait(self) -> object: ...


def wait_all(works: Sequence[Pending]) -> None:
    for work in works:
        work.wait()


class Buffers:
    """Where FSDP2's collectives exchange: buffers of the default allocator."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


#: A rank of the group, and the tensor that goes to it or comes from it.
Part = tuple[int, torch.Tensor]


def swap(received: Sequence[Part], sent: Sequence[Part], group: dist.ProcessGroup) -> list[Pending]:
    """Receive and send all parts at once; parts of one pair of ranks arrive in the order sent."""
    # All receives come first. A gloo rank announces on the same connection that it is ready to
    # receive. Were the announcement queued behind its own data, a full-duplex link would carry one
    # direction at a time; were it made while data flows, it would wait for the connection's lock.
    if "gloo" in dist.get_backend(group):
        # The group's own methods: torch.distributed's wrappers cost as much as a small message.
        return [
            *(group.recv([tensor], peer, 0) for peer, tensor in received),
            *(group.send([tensor], peer, 0) for peer, tensor in sent),
        ]
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, parts in ((dist.irecv, received), (dist.isend, sent))
        for peer, tensor in parts
    ]
    return [*dist.batch_isend_irecv(operations)] if operations else []


def any_rank(flags: Sequence[bool], topology: Topology) -> list[bool]:
    """Each of ``flags``, set if it is set on any rank of the topology.

    Two hops, first inside the node and then across, where an all-reduce of the world is 2·(W−1);
    each rank sends L − 1 + n − 1 messages of a byte per flag.
    """
    # On the CPU whatever torch.set_default_device says: gloo carries nothing else.
    known = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    for group in (topology.control_intra, topology.control_inter):
        received = [(peer, torch.empty_like(known)) for peer in _others(group)]
        sent = [(peer, known) for peer, _ in received]
        wait_all(swap(received, sent, group))
        for _, other in received:
            known |= other
    return [bool(flag) for flag in known.tolist()]


def all_gather(outputs: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[Pending]:
    """Gather each output (g·s) in place: each of the group's g ranks holds its part already.

    Each rank sends (g−1)·s elements an output.
    """
    views = [output.view(group.size(), -1) for output in outputs]
    if _over_gloo(views[0], group):  # whose own all-gather copies through buffers of its own
        others = _others(group)
        return swap(
            [(peer, view[peer]) for view in views for peer in others],
            [(peer, view[group.rank()]) for view in views for peer in others],
            group,
        )
    return [
        _all_gather(output, view[group.rank()], group=group, async_op=True)
        for output, view in zip(outputs, views, strict=True)
    ]


def reduce_scatter(
    outputs: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    op: dist.ReduceOp | dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup,
) -> list[Pending]:
    """Reduce each buffer (g·s) over the group's g ranks; this rank's part (s) goes to its output.

    Each rank sends (g−1)·s elements a buffer. Over gloo ``op`` must be a sum.
    """
    if _over_gloo(buffers[0], group):
        assert op == dist.ReduceOp.SUM, f"{op} over gloo: the engine asks FSDP2 for sums"
        return [_SwapAndAdd(outputs, buffers, group)]
    return [
        _reduce_scatter(output, buffer, op=op, group=group, async_op=True)
        for output, buffer in zip(outputs, buffers, strict=True)
    ]


def all_reduce(buffer: torch.Tensor, topology: Topology) -> tuple[int, int]:
    """Sum ``buffer`` (L·n·s) over all ranks in place, in the order of the current stream.

    Inside the node first, 1/L of it across nodes, and back the same way. Returns the bytes that
    this rank sends to other nodes, 2·(n−1)·s elements, and inside its own, 2·(L−1)·n·s.
    """
    nodes, ranks = topology.nodes, topology.ranks_per_node
    op = dist.ReduceOp.SUM
    part = buffer
    if ranks > 1:
        part = buffer.new_empty(buffer.numel() // ranks)
        wait_all(reduce_scatter([part], [buffer], op, topology.intra))
    if nodes > 1:
        own = part.new_empty(part.numel() // nodes)
        wait_all(reduce_scatter([own], [part], op, topology.inter))
        part.view(nodes, -1)[topology.node] = own
        wait_all(all_gather([part], topology.inter))
    if ranks > 1:
        buffer.view(ranks, -1)[topology.local_rank] = part
        wait_all(all_gather([buffer], topology.intra))
    size = buffer.itemsize * buffer.numel() // (nodes * ranks)
    return 2 * (nodes - 1) * size, 2 * (ranks - 1) * nodes * size


def _others(group: dist.ProcessGroup) -> list[int]:
    return [peer for peer in range(group.size()) if peer != group.rank()]


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and "gloo" in dist.get_backend(group)


class _SwapAndAdd:
    """Reduce-scatter over gloo, whose own is an all-reduce that sends twice the minimum."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        self._outputs = outputs
        parts = [list(buffer.view(group.size(), -1).unbind()) for buffer in buffers]
        #: For each output, the summands in rank order, whatever the order of arrival.
        self._summands = [
            [own if peer == group.rank() else torch.empty_like(own) for peer, own in enumerate(row)]
            for row in parts
        ]
        others = _others(group)
        self._works = swap(
            [(peer, row[peer]) for row in self._summands for peer in others],
            [(peer, row[peer]) for row in parts for peer in others],
            group,
        )

    def wait(self) -> None:
        wait_all(self._works)
        for output, (first, second, *more) in zip(self._outputs, self._summands, strict=True):
            torch.add(first, second, out=output)
            for summand in more:
                output.add_(summand)
