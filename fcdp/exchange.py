"""The two collectives that everything here is made of, moving no byte more than needed."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(Protocol):
    """An exchange under way; ``wait`` orders the current stream after it (blocks on the CPU)."""

    def wait(self) -> object: ...


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Gather ``shard`` (numel s) of each of the group's g ranks into ``output`` (g·s).

    In place where ``shard`` is this rank's part of ``output``.
    """
    return _all_gather(output, shard, group=group, async_op=True)


def reduce_scatter(
    output: torch.Tensor,
    buffer: torch.Tensor,
    op: dist.ReduceOp.RedOpType | dist.ReduceOp,
    group: dist.ProcessGroup,
) -> Pending:
    """Reduce ``buffer`` (g·s) over the group's g ranks; this rank's part (s) goes to ``output``.

    Each rank sends (g−1)·s elements. Raises ``ValueError`` for an ``op`` the backend lacks.
    """
    if dist.get_backend(group) != "gloo" or buffer.device.type != "cpu":
        return _reduce_scatter(output, buffer, op=op, group=group, async_op=True)
    return _ExchangeAndSum(output, buffer, op, group)


class _ExchangeAndSum:
    """Reduce-scatter on gloo, whose own is an all-reduce that sends twice the minimum."""

    def __init__(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        group: dist.ProcessGroup,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"op = {op}: gloo sums or averages; with set_gradient_divide_factor also call "
                "set_force_sum_reduction_for_comms(True)"
            )
        self._output = output
        self._divisor = group.size() if op == dist.ReduceOp.AVG else 1
        self._received = torch.empty_like(buffer)
        self._work = dist.all_to_all_single(self._received, buffer, group=group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        parts = self._received.view(-1, self._output.numel())
        torch.sum(parts, dim=0, out=self._output)
        if self._divisor > 1:
            self._output.div_(self._divisor)
