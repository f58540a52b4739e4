"""Gathers and reductions that are rounded once where they cross nodes."""

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.counts import Ledger
from fcdp.exchange import wait_all
from fcdp.rounding import RoundedGather, RoundedReduce, check_dtypes
from tests.fcdp.stand_ins import Place, on_threads, slice_of
from tests.fcdp.training import Run, Settings
from tests.ranks import on_ranks

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


def test_parts_of_others_arrive_in_memory_that_is_not_sent() -> None:
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 1)
    reduce = RoundedReduce(CODEC, group, Ledger(), error_feedback=False)
    with mock.patch("fcdp.rounding.all_to_all", return_value=[]) as exchanged:
        reduce.start(torch.empty(NUMEL), partial_of(1, 3, torch.float32))
    received, sent, _ = exchanged.call_args.args
    for peer in (0, 2):
        assert received[peer].shape == sent[peer].shape
        assert received[peer].data_ptr() != sent[peer].data_ptr()


class Overflowing:
    """A codec that loses a half of each value, but decodes the first three as none that is finite.

    It keeps what it encoded.
    """

    def __init__(self) -> None:
        self.encoded: list[torch.Tensor] = []

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        self.encoded.append(values.clone())
        return values.view(torch.uint8)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(encoded.view(torch.float32) - 0.5)
        out[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])


def test_losses_of_finite_values_alone_are_fed_back_until_they_are_forgotten() -> None:
    def sent(topology: Any) -> tuple[list[torch.Tensor], list[int]]:
        """Parts as they are encoded, less the gradient, and bytes of residuals after each."""
        codec, ledger = Overflowing(), Ledger()
        reduce = RoundedReduce(codec, topology.inter, ledger, error_feedback=True)
        held = []
        for step in range(3):
            if step == 2:
                reduce.forget()
                held.append(ledger.residual_bytes)
            wait_all(reduce.start(torch.empty(NUMEL), torch.ones(2 * NUMEL)))
            held.append(ledger.residual_bytes)
        return [part - 1 for part in codec.encoded], held

    none, fed = torch.zeros(NUMEL), torch.tensor([0.0] * 3 + [0.5] * (NUMEL - 3))
    for parts, held in on_threads(2, 1, sent):
        torch.testing.assert_close(parts, [none, fed, none], rtol=0, atol=0)
        assert held == [4 * NUMEL, 4 * NUMEL, 0, 4 * NUMEL]


@on_ranks(2)
def test_a_sum_of_micro_batches_is_rounded_from_the_dtype_that_it_was_added_up_in() -> None:
    run = Run(Settings(2, 1, param_dtype=torch.bfloat16, reduce_codec=CODEC))
    start, dtypes = RoundedReduce.start, set()

    def noted(reduce: RoundedReduce, output: torch.Tensor, partial: torch.Tensor) -> Any:
        dtypes.add(partial.dtype)
        return start(reduce, output, partial)

    with mock.patch.object(RoundedReduce, "start", noted):
        for last in (False, True):
            with fcdp.accumulate(run.model, last=last):
                run.loss().backward()
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("numel", range(1, 9))
def test_gathers_round_own_shards_and_messages_begin_at_multiples_of_four_bytes(
    numel: int,
) -> None:
    """This node is the second of three."""
    topology: Any = Place(3, 1)
    gather = RoundedGather(CODEC, topology)
    shards, received = torch.randn(3, numel), torch.zeros(3, numel)
    expected = torch.stack([*map(rounded, shards)])
    own, hit = shards[1].clone(), shards[1].clone()
    outgoing, messages = gather.encode(own, slice_of(received, 1))
    gather.hit(hit)
    torch.testing.assert_close([own, hit], [expected[1]] * 2, rtol=0, atol=0)
    size = CODEC.encoded_bytes(numel)
    assert outgoing.numel() == size
    assert messages.shape == (3, math.ceil(size / 4) * 4)
    messages[:, :size] = torch.stack([*map(CODEC.encode, shards)])
    gather.decode(messages, slice_of(received, 1))
    expected[1] = 0
    assert torch.equal(received, expected)


def unit_of(*dtypes: torch.dtype, packed: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(name="second", gather_dtypes=frozenset(dtypes), packed=packed)


def test_units_are_refused_that_gather_several_dtypes_another_one_or_packed_bytes() -> None:
    wide = torch.float32

    def check(unit: Any) -> None:
        taken = (wide, torch.bfloat16)
        check_dtypes([unit_of(wide), unit], CODEC, taken.__contains__, what="dtype")

    check(unit_of(torch.bfloat16))
    with pytest.raises(ValueError, match=r"second gathers packed parameters"):
        check(unit_of(wide, packed=(1,)))
    for dtypes in ((torch.int8,), (wide, torch.bfloat16), (wide, torch.int8)):
        with pytest.raises(ValueError, match=r"second gathers parameters of torch.*one dtype"):
            check(unit_of(*dtypes))
