"""Reductions that are coded exactly: sums bit for bit those of today, in fewer bytes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.counts import Ledger
from fcdp.delta import message
from fcdp.delta.economy import Economy
from fcdp.encoded_reduce import ExactParts, check_exact
from fcdp.exchange import reduce_scatter, wait_all
from tests.fcdp.training import topology_of
from tests.ranks import Pools

NUMEL = 30_001
SUM = torch.distributed.ReduceOp.SUM


def wire(when: Any = "always", ledger: Ledger | None = None) -> ExactParts:
    return ExactParts("unit", Economy(when), ledger or Ledger())


def reduced(world_size: int, dtype: torch.dtype) -> tuple[bool, float]:
    """Whether a sum is the one without the codec, and bytes sent per byte of the parts."""
    group = topology_of(world_size, 1).reduce_inter
    torch.manual_seed(group.rank())
    partial = (1e-3 * torch.randn(world_size * NUMEL)).to(dtype)
    plain, coded = torch.empty(2, NUMEL, dtype=dtype).unbind()
    ledger = Ledger()
    wait_all(reduce_scatter([plain], [partial], SUM, group))
    wait_all(reduce_scatter([coded], [partial], SUM, group, wire(ledger=ledger)))
    share = ledger.total("inter_node") / ((world_size - 1) * plain.nbytes)
    return torch.equal(plain.view(torch.uint8), coded.view(torch.uint8)), share


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.bfloat16, 11.2 / 16), (torch.float32, 27.2 / 32)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_those_without(
    ranks: Pools, world_size: int, dtype: torch.dtype, most: float
) -> None:
    for equal, share in ranks.run(world_size, reduced, world_size, dtype):
        assert equal
        assert most - 0.1 < share < most


def test_where_it_does_not_pay_parts_go_whole_and_are_counted() -> None:
    ledger, part = Ledger(), torch.randn(40_000)
    some = wire("pays", ledger)
    told = some.write(part)
    assert message.is_whole(told)
    assert ledger.bytes["inter_node"]["reduce"] == told.nbytes == part.nbytes + 16
    assert told.nbytes <= some.room(part).nbytes
    out = torch.empty_like(part)
    some.read([], [(told, out)])
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
        some = wire("pays")
        for coded in (False, False, slow, slow):
            told = some.write(part)
            assert message.is_whole(told) is not coded
            some.read([clock] if slow else [], [(told, torch.empty_like(part))])


def test_damage_is_told_with_the_unit() -> None:
    some, part = wire(), torch.randn(5000)
    told = some.write(part)
    told[200] ^= 1
    with pytest.raises(RuntimeError, match="unit: gradients of another node: .*last checkpoint"):
        some.read([], [(told, torch.empty_like(part))])


def test_sizes_that_the_host_does_not_know_are_refused_on_accelerators() -> None:
    topology = mock.Mock(mesh=mock.Mock(device_type="cuda"))
    with pytest.raises(ValueError, match=r"reduce_codec = fcdp.Exact\(\) on cuda: only the CPU"):
        check_exact(topology)


@pytest.mark.parametrize("when", ["smallest", "", None])
def test_another_rule_is_refused(when: Any) -> None:
    with pytest.raises(ValueError, match="when = .*: must be 'pays' or 'always'"):
        fcdp.Exact(when)
