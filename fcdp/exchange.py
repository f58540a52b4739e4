"""The exchanges that all collectives here consist of, which move no byte more than needed.

Tensors on the CPU travel by gloo's point-to-point messages, as its collectives send more than the
minimum, or take longer over a slow link; inside a node its all-gather takes the computing thread
least. Tensors on an accelerator travel by one collective, however many nodes there are, in the
order of the current stream. Where a tensor lies decides, not what a group is called: one group may
carry both (``cpu:gloo,cuda:nccl``), and point-to-point messages that NCCL is given one by one wait
for each other on both sides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import and_
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from fcdp.topology import Topology

#: Options by which NCCL runs a collective on the current stream instead of on one of its own.
_QUEUED = AllgatherOptions()
_QUEUED.asyncOp = False
#: Bits of ``Exchanges.place``.
PLACE_BITS = 16

Op = dist.ReduceOp | dist.ReduceOp.RedOpType

#: How gathers and reductions cross nodes: inside the node and across apart, or in one ring.
ExchangeKind = Literal["hierarchical", "flat"]

#: Nodes up to which a unit moves inside the node without a copy, a part per node. Each part takes
#: the host 3 microseconds, and NCCL an operation; beyond, one copy of the unit costs less than they
#: do, and takes its size in device memory (docs/how-it-works.md).
PARTS_MOST = 16


class Pending(Protocol):
    """An exchange under way; ``wait`` orders the current stream after it (blocks on the CPU)."""

    def wait(self) -> object: ...


def wait_all(works: Sequence[Pending]) -> None:
    for work in works:
        work.wait()


@dataclass(frozen=True)
class Then:
    """A function that runs when it is waited for, after the exchanges before it."""

    wait: Callable[[], object]


#: A rank of the group, and the tensor that goes to it or comes from it.
Part = tuple[int, torch.Tensor]


def swap(
    received: Sequence[Part], sent: Sequence[Part], group: dist.ProcessGroup
) -> Sequence[dist.Work]:
    """Receive and send all parts at once; parts of one pair of ranks arrive in the order sent."""
    if not received and not sent:
        return []
    # All receives come first. A gloo rank announces on the same connection that it is ready to
    # receive. Were the announcement queued behind its own data, a full-duplex link would carry one
    # direction at a time; were it made while data flows, it would wait for the connection's lock.
    if _on_host((*received, *sent)[0][1]):
        # The group's own methods: torch.distributed's wrappers cost as much as a small message.
        return [
            *(group.recv([tensor], peer, 0) for peer, tensor in received),
            *(group.send([tensor], peer, 0) for peer, tensor in sent),
        ]
    # One batch: NCCL runs what it is given one by one in that order on one stream per pair of
    # ranks, so that two ranks that both receive first would wait for ever.
    return [
        *dist.batch_isend_irecv(
            [
                dist.P2POp(operation, tensor, group=group, group_peer=peer)
                for operation, parts in ((dist.irecv, received), (dist.isend, sent))
                for peer, tensor in parts
            ]
        )
    ]


def swap_rows(
    tables: Sequence[Sequence[torch.Tensor] | torch.Tensor],
    own: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
) -> Sequence[dist.Work]:
    """Send each of ``own`` to all other ranks; theirs arrive in the rows of its table, by rank.

    This rank's own row is left alone.
    """
    others = _others(group)
    return swap(
        [(peer, table[peer]) for table in tables for peer in others],
        [(peer, part) for part in own for peer in others],
        group,
    )


def any_rank(flags: Sequence[bool], topology: Topology) -> list[bool]:
    """Return ``flags``, each set if it is set on any rank.

    It takes two rounds of messages, first inside the node and then across: each rank sends
    L−1 + n−1 of them, where a ring's all-reduce takes 2·(W−1) rounds.
    They carry the place of this exchange among all: raises ``RankFailed`` on all ranks if places
    differ, as every later exchange would then be matched with another one.
    """
    place = flags_of(topology.exchanges.place, PLACE_BITS)
    known = torch.tensor([*flags, *place], dtype=torch.uint8, device="cpu")
    for group in (topology.control_intra, topology.control_inter):
        for part in _gathered(known, group, topology):
            known = known | part
    merged = [bool(flag) for flag in known.tolist()]
    if differs(merged[len(flags) :]):
        topology.failures.raise_out_of_step()
    return merged[: len(flags)]


def flags_of(number: int, bits: int) -> list[bool]:
    """List the lowest ``bits`` of a number and then their inverses, as flags for ``any_rank``.

    A bit that differs between ranks is set on one of them, and its inverse on another.
    """
    own = [bool(number >> bit & 1) for bit in range(bits)]
    return [*own, *(not bit for bit in own)]


def differs(merged: Sequence[bool]) -> bool:
    """Whether a number differs between ranks, by its ``flags_of`` as ``any_rank`` returns them."""
    half = len(merged) // 2
    return any(map(and_, merged[:half], merged[half:]))


def on_every_rank(values: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Gather ``values`` (k), in host memory, of all ranks: (W, k) in rank order."""
    known = values[None]
    for group in (topology.control_intra, topology.control_inter):
        known = torch.cat(_gathered(known, group, topology))
    return known


def _gathered(
    own: torch.Tensor, group: dist.ProcessGroup, topology: Topology
) -> list[torch.Tensor]:
    """Gather ``own`` of all ranks of a group, in rank order, by messages of the host.

    In a group that sends nothing (torch's "fake") all are this rank's own.
    """
    parts = [own.clone() for _ in range(group.size())]
    with topology.exchanges:
        wait_all(swap_rows([parts], [own], group))
    return parts


def all_gather(
    outputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    inputs: Sequence[torch.Tensor] | None = None,
    *,
    ring: bool = False,
) -> list[Pending]:
    """Gather each output (g·s) from the group's g ranks, by one collective.

    On an accelerator it is queued when this returns, and there is nothing to wait for. Each rank
    has an input (s) per output; without ``inputs`` it is in its place in the output already. Each
    rank sends (g−1)·s elements per output.

    On the CPU ranks send to each other, or, by ``ring``, gloo does, round a ring: its threads carry
    that out while this one computes, and of a node's ranks one sends to the next node. Over a slow
    link a ring takes longer.
    """
    # No view more than needed: there is an output per node, and each view costs a microsecond.
    if inputs is None:
        inputs = [output.view(group.size(), -1)[group.rank()] for output in outputs]
    if _on_host(outputs[0]):
        if ring:
            # As bytes, since gloo knows few dtypes.
            return [
                group._allgather_base(output.view(torch.uint8), part.view(torch.uint8))
                for output, part in zip(outputs, inputs, strict=True)
            ]
        views = [output.view(group.size(), -1) for output in outputs]
        for view, part in zip(views, inputs, strict=True):
            place = view[group.rank()]
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)
        return [*swap_rows(views, inputs, group)]
    # The group's own methods, here and below: torch.distributed's take the host as long again.
    if len(outputs) == 1:
        return _queued(group._allgather_base(outputs[0], inputs[0], _QUEUED))
    return _queued(group.allgather_into_tensor_coalesced([*outputs], [*inputs], _QUEUED))


def reduce_scatter(
    outputs: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    *,
    op: Op,
    group: dist.ProcessGroup,
) -> list[Pending]:
    """Reduce each buffer (g·s) over the group's g ranks; this rank's part (s) goes to its output.

    By one collective. Each rank sends (g−1)·s elements per buffer. Raises ``ValueError`` on the CPU
    for anything but a sum and an average.
    """
    if _on_host(buffers[0]):
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"op = {op}: must be a sum or an average on the CPU, as gloo has no other"
            )
        return [_swap_and_add(outputs, buffers, op=op, group=group)]
    options = ReduceScatterOptions()
    # The binding takes a plain ``RedOpType``, too.
    options.reduceOp = op  # type: ignore[assignment]
    options.asyncOp = False
    if len(outputs) == 1:
        return _queued(group._reduce_scatter_base(outputs[0], buffers[0], options))
    return _queued(group.reduce_scatter_tensor_coalesced([*outputs], [*buffers], options))


def _queued(work: dist.Work | None) -> list[Pending]:
    """Order the current stream after a collective; NCCL's are queued on it, and return no work."""
    if work is not None:
        work.wait()
    return []


def reduce_scatter_parts(
    output: torch.Tensor, buffer: torch.Tensor, parts: int, *, op: Op, group: dist.ProcessGroup
) -> list[Pending]:
    """Reduce k ``parts`` of ``buffer`` (k·g·s) over the group's g ranks to ``output`` (k·s).

    On an accelerator no part moves twice up to :data:`PARTS_MOST`; more are put in order first.
    """
    if parts <= PARTS_MOST or _on_host(buffer):
        return reduce_scatter(output.chunk(parts), buffer.chunk(parts), op=op, group=group)
    by_rank = buffer.view(parts, group.size(), -1).transpose(0, 1)
    return reduce_scatter([output], [by_rank.reshape(-1)], op=op, group=group)


def ring_reduce_scatter(
    output: torch.Tensor, buffer: torch.Tensor, *, op: Op, group: dist.ProcessGroup
) -> None:
    """Reduce ``buffer`` (g·s) over the group's g ranks to ``output`` (s), by one collective.

    On the CPU round a ring too: a part begins behind its rank, and ends there. Each step of it
    follows from the one before, so that it has ended when this returns.
    """
    if not _on_host(buffer):
        reduce_scatter([output], [buffer], op=op, group=group)
        return
    assert op == dist.ReduceOp.SUM, f"{op}: the engine asks FSDP2 for sums"
    size, rank = group.size(), group.rank()
    parts = buffer.view(size, -1)
    passed = parts[rank - 1]
    for step in range(2, size + 1):
        arriving = torch.empty_like(passed)
        wait_all(swap([((rank - 1) % size, arriving)], [((rank + 1) % size, passed)], group))
        passed = arriving.add_(parts[(rank - step) % size])
    output.copy_(passed)


def ring_bytes(part: int, topology: Topology) -> tuple[int, int]:
    """Return the bytes that a rank sends in a ring, ``part`` at a time: to other nodes, and inside.

    One rank of a node sends all that leaves it; here each has its share of that.
    """
    sent = (topology.world_size - 1) * part
    across = sent // topology.ranks_per_node
    return across, sent - across


def all_to_all(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[Pending]:
    """Send ``sent[i]`` to rank i, whose part for this rank arrives in ``received[i]``.

    By one collective. The own parts are left alone; they may be empty.
    """
    others = _others(group)
    if not others:
        return []
    if _on_host(sent[0]):
        return [
            *swap(
                [(peer, received[peer]) for peer in others],
                [(peer, sent[peer]) for peer in others],
                group,
            )
        ]
    nothing = sent[others[0]].new_empty(0)
    mine = group.rank()
    outputs = [nothing if peer == mine else part for peer, part in enumerate(received)]
    inputs = [nothing if peer == mine else part for peer, part in enumerate(sent)]
    dist.all_to_all(outputs, inputs, group=group)
    return []


def all_reduce(buffer: torch.Tensor, topology: Topology) -> tuple[int, int]:
    """Sum ``buffer`` (L·n·s) over all ranks in place, in the order of the current stream.

    Inside the node first, 1/L of it across nodes, and back the same way. Returns the bytes that
    this rank sends to other nodes, 2·(n−1)·s elements, and inside its own, 2·(L−1)·n·s.
    """
    nodes, ranks = topology.nodes, topology.ranks_per_node
    op = dist.ReduceOp.SUM
    part = buffer
    with topology.exchanges:
        if ranks > 1:
            part = buffer.new_empty(buffer.numel() // ranks)
            wait_all(reduce_scatter([part], [buffer], op=op, group=topology.reduce_intra))
        if nodes > 1:
            own = part.new_empty(part.numel() // nodes)
            wait_all(reduce_scatter([own], [part], op=op, group=topology.reduce_inter))
            part.view(nodes, -1)[topology.node] = own
            wait_all(all_gather([part], topology.reduce_inter))
        if ranks > 1:
            buffer.view(ranks, -1)[topology.local_rank] = part
            wait_all(all_gather([buffer], topology.reduce_intra))
    size = buffer.itemsize * buffer.numel() // (nodes * ranks)
    return 2 * (nodes - 1) * size, 2 * (ranks - 1) * nodes * size


def _others(group: dist.ProcessGroup) -> list[int]:
    rank = group.rank()
    return [peer for peer in range(group.size()) if peer != rank]


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _swap_and_add(
    outputs: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    *,
    op: Op,
    group: dist.ProcessGroup,
) -> Then:
    """Reduce-scatter over gloo, whose own is an all-reduce that sends twice the minimum."""
    size, rank, others = group.size(), group.rank(), _others(group)
    parts = [buffer.view(size, -1).unbind() for buffer in buffers]
    summands = [
        [own if peer == rank else torch.empty_like(own) for peer, own in enumerate(row)]
        for row in parts
    ]
    works = swap(
        [(peer, row[peer]) for row in summands for peer in others],
        [(peer, row[peer]) for row in parts for peer in others],
        group,
    )

    def finish() -> None:
        wait_all(works)
        for output, row in zip(outputs, summands, strict=True):
            add_up(output, row)
            if op == dist.ReduceOp.AVG:
                output.div_(size)

    return Then(finish)


def add_up(output: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    """Fill ``output`` with the sum, added in rank order whatever the order of arrival."""
    first, second, *more = summands
    torch.add(first, second, out=output)
    for summand in more:
        output.add_(summand)
