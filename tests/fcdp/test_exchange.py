"""The exchanges give what the collectives of torch.distributed give."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fcdp.exchange import all_gather, any_rank, reduce_scatter, swap
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


def flags_of(nodes: int, ranks_per_node: int, setter: int) -> list[bool]:
    topology = topology_of(nodes, ranks_per_node)
    return any_rank([False, topology.rank == setter, False], topology)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 3), (3, 1), (1, 2), (2, 2)])
def test_a_flag_of_any_rank_reaches_all(ranks: Pools, nodes: int, ranks_per_node: int) -> None:
    world_size = nodes * ranks_per_node
    for setter in range(world_size):
        answers = ranks.run(world_size, flags_of, nodes, ranks_per_node, setter)
        assert answers == [[False, True, False]] * world_size


def flags_beside_another_default_device() -> list[bool]:
    topology = topology_of(2, 1)
    with torch.device("meta"):
        return any_rank([topology.rank == 1, False], topology)


def test_flags_are_exchanged_on_the_host_whatever_the_default_device(ranks: Pools) -> None:
    assert ranks.run(2, flags_beside_another_default_device) == [[True, False]] * 2


def swap_alone() -> int:
    return len(swap([], [], topology_of(1, 1).intra))


def test_one_rank_swaps_with_nobody(ranks: Pools) -> None:
    assert ranks.run(1, swap_alone) == [0]
