"""Reductions whose parts are coded by their exponents and arrive bit for bit."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.counts import Ledger
from fcdp.delta import message
from fcdp.delta.economy import Economy
from fcdp.delta.exact_reduce import ExactReduce, ExactReductions
from fcdp.exchange import reduce_scatter, wait_all
from tests.fcdp.stand_ins import on_threads

LONG = 30_001
SUM = torch.distributed.ReduceOp.SUM


def exact(when: Any = "always", ledger: Ledger | None = None, group: Any = None) -> ExactReduce:
    return ExactReduce("unit", group, economy=Economy(when), ledger=ledger or Ledger())


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
        wait_all(reduce_scatter([plain], [partial], op=SUM, group=topology.inter))
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


def test_a_first_part_is_coded_where_that_takes_less_than_sending_it_to_one_node() -> None:
    """A part goes to one node. Nothing is known of its coded size: at best it is nothing."""
    for coding, coded in ((0.9e-9, True), (1.1e-9, False), (1.9e-9, False)):
        some, nbytes = exact("pays"), 2**20
        some.economy.encoding.add(coding)
        for _ in range(2):
            some.economy.saw_whole(1e-9 * nbytes, nbytes)
        assert message.is_whole(some.write(torch.randn(40_000))) is not coded


def test_what_coding_a_part_took_and_saved_decides_on_the_next() -> None:
    some, part = exact(), torch.randn(40_000)
    with (
        mock.patch("time.perf_counter", partial(next, itertools.count(0, 2))),
        mock.patch.object(some.economy, "pays", return_value=True) as pays,
    ):
        encoded = some.write(part)
        some.write(part)
    assert some.economy.encoding.value == 2 / part.nbytes
    assert pays.mock_calls == [
        mock.call(ratio, others=1) for ratio in (0.0, encoded.nbytes / part.nbytes)
    ]


def test_an_exchange_tells_of_whole_parts_where_all_of_them_are() -> None:
    some, part = exact(), torch.randn(40_000)
    whole, coded = message.whole(part), some.write(part)
    some.economy = economy = mock.Mock()
    for arrived in ([whole], [whole, whole], [whole, coded], [coded]):
        some.read([], [(each, torch.empty_like(part)) for each in arrived])
    sizes = [
        [call.args[1] for call in saw.mock_calls] for saw in (economy.saw_whole, economy.saw_coded)
    ]
    assert sizes == [[part.nbytes, 2 * part.nbytes], [2 * part.nbytes, part.nbytes]]


def test_a_part_without_elements_is_written_and_read() -> None:
    some, part = exact(), torch.empty(0)
    encoded = some.write(part)
    some.read([], [(encoded, part.clone())])
    assert some.ledger.total("inter_node") == encoded.nbytes <= message.most_bytes(part)
    assert some.economy.encoding.value is None, "its time says nothing of a byte's"


def test_damage_is_reported_with_the_unit() -> None:
    some, part = exact(), torch.randn(5000)
    encoded = some.write(part)
    encoded[200] ^= 1
    with pytest.raises(RuntimeError, match="unit: gradients of another node: .*last checkpoint"):
        some.read([], [(encoded, torch.empty_like(part))])


def test_sizes_that_the_host_does_not_know_are_refused_on_accelerators() -> None:
    topology = mock.Mock(mesh=mock.Mock(device_type="cuda"))
    with pytest.raises(ValueError, match=r"reduce_codec = fcdp.Exact\(\) on cuda: only the CPU"):
        fcdp.Exact().check(topology)


@pytest.mark.parametrize("when", ["smallest", "", None])
def test_another_rule_is_refused(when: Any) -> None:
    with pytest.raises(ValueError, match="when = .*: must be 'pays' or 'always'"):
        fcdp.Exact(when)


def test_ranks_learn_their_link_anew_where_they_agree_to() -> None:
    parts: Any = SimpleNamespace(ledger=Ledger())
    reductions = ExactReductions("pays", parts)
    economy: Any = mock.Mock(faster=True)
    reductions._economy = economy
    assert reductions.votes() == [True]
    reductions.agreed([False, True])
    assert economy.measure_again.call_count == 0
    reductions.agreed([True, False])
    assert economy.measure_again.call_count == 1
    economy.faster = False
    assert reductions.votes() == [False]


def test_a_units_coded_parts_cross_nodes_in_the_group_of_reductions() -> None:
    parts: Any = SimpleNamespace(ledger=Ledger())
    reductions = ExactReductions("pays", parts)
    unit: Any = SimpleNamespace(name="a", topology=SimpleNamespace(inter="in", reduce_inter="out"))
    assert reductions.hook(unit).group == "out"
