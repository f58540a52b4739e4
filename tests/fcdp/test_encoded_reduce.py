"""Coded reductions: parts that are rounded once, and parts that arrive bit for bit."""

from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.counts import Ledger
from fcdp.delta import message
from fcdp.delta.economy import Economy
from fcdp.encoded_reduce import EncodedReduce, ExactReduce, check_exact
from fcdp.exchange import reduce_scatter, wait_all
from tests.fcdp.stand_ins import on_threads

CODEC = fcdp.BlockInt4(4)
NUMEL = 10


def reducer(topology: Any, *, error_feedback: bool = False) -> EncodedReduce:
    return EncodedReduce(CODEC, topology.inter, Ledger(), error_feedback=error_feedback)


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


LONG = 30_001
SUM = torch.distributed.ReduceOp.SUM


def exact(when: Any = "always", ledger: Ledger | None = None, group: Any = None) -> ExactReduce:
    return ExactReduce("unit", group, Economy(when), ledger or Ledger())


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 11.2 / 16), (torch.float32, 27.2 / 32)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_those_without(world_size: int, dtype: torch.dtype, most: float) -> None:
    def reduced(topology: Any) -> tuple[bool, float]:
        """Whether the sum is the one without the codec, and bytes sent per byte of the parts."""
        generator = torch.Generator().manual_seed(topology.rank)
        partial = (1e-3 * torch.randn(world_size * LONG, generator=generator)).to(dtype)
        plain, coded = torch.empty(2, LONG, dtype=dtype).unbind()
        ledger = Ledger()
        wait_all(reduce_scatter([plain], [partial], SUM, topology.inter))
        wait_all(exact("always", ledger, topology.inter).start(coded, partial))
        share = ledger.total("inter_node") / ((world_size - 1) * plain.nbytes)
        return torch.equal(plain.view(torch.uint8), coded.view(torch.uint8)), share

    for equal, share in on_threads(world_size, 1, reduced):
        assert equal
        assert most - 0.1 < share < most


def test_where_it_does_not_pay_parts_go_whole_and_are_counted() -> None:
    ledger, part = Ledger(), torch.randn(40_000)
    some = exact("pays", ledger)
    encoded = some.write(part)
    assert message.is_whole(encoded)
    assert ledger.bytes["inter_node"]["reduce"] == encoded.nbytes == part.nbytes + 16
    assert encoded.nbytes <= message.most_bytes(part)
    out = torch.empty_like(part)
    some.read([], [(encoded, out)])
    assert torch.equal(out, part)


class Clock:
    """Time, which passes where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self) -> None:
        self.now += 1.0


@pytest.mark.parametrize("slow", [True, False])
def test_slow_links_get_coded_parts_and_fast_ones_whole(slow: bool) -> None:
    clock, part = Clock(), torch.randn(40_000)
    with mock.patch("time.perf_counter", clock):
        some = exact("pays")
        for coded in (False, False, slow, slow):
            encoded = some.write(part)
            assert message.is_whole(encoded) is not coded
            some.read([clock] if slow else [], [(encoded, torch.empty_like(part))])


def test_damage_is_reported_with_the_unit() -> None:
    some, part = exact(), torch.randn(5000)
    encoded = some.write(part)
    encoded[200] ^= 1
    with pytest.raises(RuntimeError, match="unit: gradients of another node: .*last checkpoint"):
        some.read([], [(encoded, torch.empty_like(part))])


def test_sizes_that_the_host_does_not_know_are_refused_on_accelerators() -> None:
    topology = mock.Mock(mesh=mock.Mock(device_type="cuda"))
    with pytest.raises(ValueError, match=r"reduce_codec = fcdp.Exact\(\) on cuda: only the CPU"):
        check_exact(topology)


@pytest.mark.parametrize("when", ["smallest", "", None])
def test_another_rule_is_refused(when: Any) -> None:
    with pytest.raises(ValueError, match="when = .*: must be 'pays' or 'always'"):
        fcdp.Exact(when)
