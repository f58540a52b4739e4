"""The two collectives that everything here is made of, moving no byte more than needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """An exchange under way; ``wait`` orders the current stream after it (blocks on the CPU)."""

    def wait(self) -> object: ...


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather ``shard`` (numel s) of each of the group's g ranks into ``output`` (g·s).

    In place where ``shard`` is this rank's part of ``output``. Each rank sends (g−1)·s elements.
    """
    if _over_gloo(output, group):
        return _GlooAllGather(output, shard, group)
    return _all_gather(output, shard, group=group, async_op=True)


def reduce_scatter(
    output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup
) -> Pending:
    """Reduce ``buffer`` (g·s) over the group's g ranks; this rank's part (s) goes to ``output``.

    Each rank sends (g−1)·s elements. Raises ``ValueError`` for an ``op`` the backend lacks.
    """
    if _over_gloo(buffer, group):
        return _GlooReduceScatter(output, buffer, op, group)
    return _reduce_scatter(output, buffer, op=op, group=group, async_op=True)


# Gloo's own collectives are not used. Its reduce-scatter is an all-reduce, twice the bytes. Its
# all-gather copies through a buffer of its own, and both it and all-to-all may start a rank's data
# before that rank has announced that it is ready to receive: the announcement then waits behind
# the data in the same connection, and a full-duplex link carries one direction at a time.


def _over_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return tensor.device.type == "cpu" and "gloo" in dist.get_backend(group)


def _swap(
    received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Exchange with every other rank of the group: part i goes to rank i and comes from it."""
    others = [
        (index, dist.get_global_rank(group, index))
        for index in range(group.size())
        if index != group.rank()
    ]
    # All receives first: see above.
    works = [dist.irecv(received[index], src=peer, group=group) for index, peer in others]
    works += [dist.isend(sent[index], dst=peer, group=group) for index, peer in others]
    return [work for work in works if work is not None]


class _GlooAllGather:
    def __init__(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        parts = output.view(group.size(), -1)
        self._works = _swap(parts, [shard] * group.size(), group)
        own = parts[group.rank()]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _GlooReduceScatter:
    def __init__(
        self, output: torch.Tensor, buffer: torch.Tensor, op: ReduceOp, group: dist.ProcessGroup
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"op = {op}: gloo sums or averages; with set_gradient_divide_factor also call "
                "set_force_sum_reduction_for_comms(True)"
            )
        self._output = output
        self._divisor = group.size() if op == dist.ReduceOp.AVG else 1
        parts = buffer.view(group.size(), -1)
        self._received = torch.empty_like(parts)
        self._works = _swap(self._received, parts, group)
        self._received[group.rank()].copy_(parts[group.rank()])

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        # In rank order on every rank, whatever the order of arrival.
        torch.sum(self._received, dim=0, out=self._output)
        if self._divisor > 1:
            self._output.div_(self._divisor)
