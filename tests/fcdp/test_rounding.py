"""Reductions whose parts are rounded once where they cross nodes."""

from typing import Any

import pytest
import torch

import fcdp
from fcdp.counts import Ledger
from fcdp.exchange import wait_all
from fcdp.rounding import RoundedReduce
from tests.fcdp.stand_ins import on_threads

CODEC = fcdp.BlockInt4(4)
NUMEL = 10


def reducer(topology: Any, *, error_feedback: bool = False) -> RoundedReduce:
    return RoundedReduce(CODEC, topology.inter, Ledger(), error_feedback=error_feedback)


def partial_of(rank: int, world_size: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(world_size * numel, generator=generator).to(dtype)


def of_pair(topology: Any, numel: int = NUMEL) -> torch.Tensor:
    return partial_of(topology.rank, 2, torch.float32, numel)


def rounded(part: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(part)
    CODEC.decode(CODEC.encode(part), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_own_part_is_exact_and_the_others_are_rounded_once(
    world_size: int, dtype: torch.dtype
) -> None:
    def reduced(topology: Any) -> tuple[torch.Tensor, int]:
        output = torch.empty(NUMEL, dtype=dtype)
        encoded = reducer(topology)
        wait_all(encoded.start(output, partial_of(topology.rank, world_size, dtype)))
        return output, encoded.ledger.total("inter_node")

    wide = torch.promote_types(dtype, torch.float32)
    for receiver, (output, sent) in enumerate(on_threads(world_size, 1, reduced)):
        expected = torch.zeros(NUMEL, dtype=wide)
        for rank in range(world_size):
            part = partial_of(rank, world_size, dtype).view(world_size, -1)[receiver].to(wide)
            expected += part if rank == receiver else rounded(part)
        assert torch.equal(output, expected.to(dtype))
        assert sent == (world_size - 1) * CODEC.encoded_bytes(NUMEL)


def test_feedback_loses_nothing_in_the_long_run() -> None:
    def mean_of_many(topology: Any) -> list[torch.Tensor]:
        """Means of reductions of one gradient, with feedback and without."""
        means = []
        for error_feedback in (True, False):
            reduce = reducer(topology, error_feedback=error_feedback)
            total, output = torch.zeros(NUMEL), torch.empty(NUMEL)
            for _ in range(50):
                wait_all(reduce.start(output, of_pair(topology)))
                total += output
            means.append(total / 50)
        return means

    exact = sum(partial_of(rank, 2, torch.float32) for rank in range(2)).view(2, -1)
    for receiver, means in enumerate(on_threads(2, 1, mean_of_many)):
        fed, plain = ((mean - exact[receiver]).abs().max() for mean in means)
        assert fed < plain / 10


def test_an_overflow_is_seen_once_and_does_not_stay_in_the_residual() -> None:
    def finite(topology: Any) -> list[bool]:
        reduce = reducer(topology, error_feedback=True)
        overflowed, output, flags = of_pair(topology), torch.empty(NUMEL), []
        overflowed[3::NUMEL] = torch.inf
        for partial in (overflowed, of_pair(topology)):
            wait_all(reduce.start(output, partial))
            flags.append(bool(output.isfinite().all()))
        return flags

    assert on_threads(2, 1, finite) == [[False, True]] * 2


def test_the_residual_is_dropped_when_the_layout_changes() -> None:
    """The first reduction of a new layout is as if nothing had been reduced before."""

    def first(topology: Any) -> bool:
        used, fresh = (reducer(topology, error_feedback=True) for _ in range(2))
        wait_all(used.start(torch.empty(NUMEL), of_pair(topology)))
        outputs = torch.empty(2, 1)
        for output, reduce in zip(outputs, (used, fresh), strict=True):
            wait_all(reduce.start(output, of_pair(topology, numel=1)))
        return torch.equal(outputs[0], outputs[1])

    assert on_threads(2, 1, first) == [True] * 2
