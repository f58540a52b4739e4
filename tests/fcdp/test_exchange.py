"""The exchanges give what the collectives of torch.distributed give."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fcdp.exchange import all_gather, any_rank, reduce_scatter, reduce_scatter_parts, swap
from tests.fcdp.training import topology_of
from tests.ranks import Pools


def gather_and_reduce(numel: int, dtype: torch.dtype) -> None:
    topology = topology_of(1, dist.get_world_size())
    group, world = topology.intra, topology.world_size
    generator = torch.Generator().manual_seed(topology.rank)
    shard = torch.randn(numel, generator=generator).to(dtype)
    expected = torch.empty(world * numel, dtype=dtype)
    dist.all_gather(list(expected.view(world, -1).unbind()), shard, group=group)

    output = torch.full_like(expected, torch.nan)
    output.view(world, -1)[topology.rank] = shard
    for work in all_gather([output], group):
        work.wait()
    assert torch.equal(output, expected)

    buffer = torch.randn(world * numel, generator=generator).to(dtype)
    total = buffer.float().clone()
    dist.all_reduce(total, group=group)
    reduced = torch.empty(numel, dtype=dtype)
    for work in reduce_scatter([reduced], [buffer], dist.ReduceOp.SUM, group):
        work.wait()
    torch.testing.assert_close(
        reduced, total.view(world, -1)[topology.rank].to(dtype), rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world_size", "numel"), [(2, 5), (3, 7), (4, 100_000)])
def test_gather_and_reduce_scatter_equal_the_library(
    ranks: Pools, world_size: int, numel: int, dtype: torch.dtype
) -> None:
    ranks.run(world_size, gather_and_reduce, numel, dtype)


def flags_beside_another_default_device() -> list[bool]:
    topology = topology_of(2, 1)
    with torch.device("meta"):
        return any_rank([topology.rank == 1, False], topology)


def test_flags_are_exchanged_on_the_host_whatever_the_default_device(ranks: Pools) -> None:
    assert ranks.run(2, flags_beside_another_default_device) == [[True, False]] * 2


class CombinedGroup:
    """What ``init_process_group("cpu:gloo,cuda:nccl")`` makes: a name that says gloo too."""

    def name(self) -> str:
        return "cpu:gloo,cuda:nccl"


def test_what_is_not_on_the_cpu_goes_in_one_batch_whatever_the_group_is_called() -> None:
    """Unbatched, NCCL runs a pair's receive before its send, on both sides: neither would start."""
    tensor = torch.empty(2, device="meta")
    group: Any = CombinedGroup()
    with (
        mock.patch("torch.distributed.get_backend", return_value="cpu:gloo,cuda:nccl"),
        mock.patch("torch.distributed.P2POp", side_effect=lambda op, *_, **__: op.__name__),
        mock.patch("torch.distributed.batch_isend_irecv", return_value=["work"]) as batch,
    ):
        assert swap([(1, tensor)], [(1, tensor)], group) == ["work"]
    batch.assert_called_once_with(["irecv", "isend"])


class Recording:
    """A group of an accelerator: what is asked of it, call by call."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.calls: list[str] = []

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        self.calls.append(f"all-gather of {len(outputs)}, asynchronous {options.asyncOp}")
        return mock.Mock(wait=lambda: self.calls.append("waited for"))

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        self.calls.append(f"reduce-scatter of {len(outputs)}, asynchronous {options.asyncOp}")
        return mock.Mock(wait=lambda: self.calls.append("waited for"))


def test_an_accelerator_is_asked_for_one_collective_however_many_parts() -> None:
    group: Any = Recording(8)
    whole = [torch.empty(8 * 4, device="meta") for _ in range(64)]
    parts = [torch.empty(4, device="meta") for _ in range(64)]
    assert all_gather(whole, group, parts) == []
    assert reduce_scatter(parts, whole, dist.ReduceOp.SUM, group) == []
    assert group.calls == [
        "all-gather of 64, asynchronous False",
        "waited for",
        "reduce-scatter of 64, asynchronous False",
        "waited for",
    ]


@pytest.mark.parametrize(("nodes", "parts"), [(16, 16), (17, 1), (64, 1)])
def test_what_an_accelerator_is_given_does_not_grow_with_the_nodes(nodes: int, parts: int) -> None:
    group: Any = Recording(2)
    output, buffer = torch.empty(nodes, 3), torch.arange(nodes * 2 * 3.0).view(nodes, 2, 3)
    single = mock.Mock()
    with (
        mock.patch("fcdp.exchange._on_host", return_value=False),
        mock.patch("fcdp.exchange._reduce_scatter", single),
    ):
        assert reduce_scatter_parts(output, buffer.view(-1), dist.ReduceOp.SUM, group) == []
    if parts > 1:
        assert group.calls == [f"reduce-scatter of {parts}, asynchronous False", "waited for"]
        return
    assert group.calls == []
    given_output, given = single.call_args.args
    assert given_output.data_ptr() == output.data_ptr()
    for rank, of_rank in enumerate(given.view(2, nodes, 3)):
        assert torch.equal(of_rank, buffer[:, rank])
