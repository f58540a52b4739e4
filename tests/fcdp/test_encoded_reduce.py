"""The encoded reduction: parts rounded once, summed in rank order; what was lost comes later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fcdp
from fcdp.counts import Ledger
from fcdp.encoded_reduce import EncodedReduce
from fcdp.exchange import wait_all
from tests.fcdp.training import topology_of
from tests.ranks import Pools, on_ranks

CODEC = fcdp.BlockInt4(4)
NUMEL = 10


def reducer(world_size: int, *, error_feedback: bool = False) -> EncodedReduce:
    group = topology_of(world_size, 1).inter
    return EncodedReduce(CODEC, group, Ledger(), error_feedback=error_feedback)


def partial_of(rank: int, world_size: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world_size * numel, generator=generator).to(dtype)


def rounded(part: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(part)
    CODEC.decode(CODEC.encode(part), out)
    return out


def reduced(world_size: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Whether the result is, bit for bit, what the definition says; and bytes sent."""
    topology = topology_of(world_size, 1)
    output = torch.empty(NUMEL, dtype=dtype)
    partial = partial_of(topology.rank, world_size, dtype)
    encoded = reducer(world_size)
    wait_all(encoded.start(output, partial))
    wide = torch.promote_types(dtype, torch.float32)
    expected = torch.zeros(NUMEL, dtype=wide)
    for rank in range(world_size):
        part = partial_of(rank, world_size, dtype).view(world_size, -1)[topology.rank].to(wide)
        expected += part if rank == topology.rank else rounded(part)
    return torch.equal(output, expected.to(dtype)), encoded.sent_bytes(NUMEL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_own_part_is_exact_and_the_others_are_rounded_once(
    ranks: Pools, world_size: int, dtype: torch.dtype
) -> None:
    answers = ranks.run(world_size, reduced, world_size, dtype)
    assert answers == [(True, (world_size - 1) * CODEC.encoded_bytes(NUMEL))] * world_size


def lost_over_time(error_feedback: bool) -> float:
    """How far the sum of many reductions of one gradient is from the exact one."""
    reduce = reducer(2, error_feedback=error_feedback)
    partial = partial_of(topology_of(2, 1).rank, 2, torch.float32)
    total, output = torch.zeros(NUMEL), torch.empty(NUMEL)
    for _ in range(50):
        wait_all(reduce.start(output, partial))
        total += output
    exact = partial.clone()
    dist.all_reduce(exact)
    mine = exact.view(2, -1)[topology_of(2, 1).rank]
    return (total / 50 - mine).abs().max().item()


@on_ranks(2)
def test_feedback_loses_nothing_in_the_long_run() -> None:
    assert lost_over_time(error_feedback=True) < lost_over_time(error_feedback=False) / 10


@on_ranks(2)
def test_an_overflow_is_seen_once_and_does_not_stay_in_the_residual() -> None:
    reduce = reducer(2, error_feedback=True)
    partial = partial_of(topology_of(2, 1).rank, 2, torch.float32)
    output = torch.empty(NUMEL)
    overflowed = partial.clone()
    overflowed[3::NUMEL] = torch.inf
    wait_all(reduce.start(output, overflowed))
    assert not output.isfinite().all()
    wait_all(reduce.start(output, partial))
    assert output.isfinite().all()


@on_ranks(2)
def test_the_residual_is_dropped_when_the_layout_changes() -> None:
    """The first reduction of a new layout is as if nothing had been reduced before."""
    rank = topology_of(2, 1).rank
    used, fresh = reducer(2, error_feedback=True), reducer(2, error_feedback=True)
    wait_all(used.start(torch.empty(NUMEL), partial_of(rank, 2, torch.float32)))
    other = partial_of(rank, 2, torch.float32, numel=1)
    outputs = torch.empty(2, 1)
    for output, reduce in zip(outputs, (used, fresh), strict=True):
        wait_all(reduce.start(output, other))
    assert torch.equal(outputs[0], outputs[1])
