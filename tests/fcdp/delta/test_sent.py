"""Versions that a rank sends differences from, and when it sends none."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.cache.cache import Entry
from fcdp.delta import message
from fcdp.delta.economy import Mean, Watch
from fcdp.delta.sent import Sent
from tests.fcdp.stand_ins import Place, StandInUnit


def mock_economy() -> Any:
    """A stand-in for an economy, which says that packed codes pay, and finer ones do not."""
    means = {name: Mean() for name in ("encoding", "applied", "finer")}
    economy = mock.Mock(**means)
    economy.pays.return_value = True
    economy.finer_pays.return_value = False
    return economy


def asked(question: mock.Mock) -> list[tuple[Any, ...]]:
    return [call.args for call in question.call_args_list]


def sent_shard(nodes: int = 3) -> tuple[Sent, Entry, Any, torch.Tensor]:
    """Return the base of a shard that all ranks hold, as generation 4."""
    unit: Any = StandInUnit("unit", 8, topology=Place(nodes, 0))
    entry, economy = Entry(unit), mock_economy()
    sent = Sent(entry, economy)
    assert not sent.usable
    for generation in (1, 4):
        entry.tier, entry.held, entry.offered = "host", generation, generation
        assert not sent.usable  # nothing was given to keep
    own = torch.randn(64).bfloat16()
    sent.keep(own)
    return sent, entry, economy, own


def test_a_difference_leads_from_the_last_version() -> None:
    sent, entry, economy, own = sent_shard()
    new = own * 1.01
    written = sent.write(new)
    assert asked(economy.pays) == [(0.0, 2)]
    assert economy.encoding.value > 0
    assert economy.applied.value is None
    row = own.clone()
    sent.read(written, row)
    assert torch.equal(row, new)
    assert economy.applied.value > 0
    assert not sent.usable  # until it is kept again
    entry.offered = entry.held = 5
    sent.keep(new)
    assert sent.usable
    sent.write(new)
    assert asked(economy.pays)[-1] == (written.nbytes / own.nbytes, 2)


def test_entropy_codes_are_taken_where_they_pay_and_asked_by_what_they_took() -> None:
    sent, entry, economy, _ = sent_shard()
    own = torch.randn(4096).bfloat16()
    sizes = []
    for version, finer in ((5, False), (6, True), (7, True)):
        entry.held = entry.offered = version
        sent.keep(own)
        economy.finer_pays.return_value = finer
        sizes.append(sent.write(own * 1.01).nbytes / own.nbytes)
    packed, entropy, again = sizes
    assert entropy == again < packed < 0.5
    assert [(ratio, finer) for ratio, finer, _ in asked(economy.finer_pays)[1:]] == [
        (packed, 0.0),
        (packed, entropy),
    ]


@pytest.mark.parametrize(
    ("tier", "held", "offered", "usable"),
    [
        ("host", 4, 4, True),
        (None, 4, 4, False),
        ("host", 3, 4, False),
        ("host", 5, 5, False),
        ("host", 1, 1, False),  # until it is kept: the first difference leads from it
    ],
)
def test_what_this_rank_does_not_hold_itself_it_cannot_take_a_difference_of(
    tier: Any, held: int, offered: int, usable: bool
) -> None:
    sent, entry, _, own = sent_shard()
    entry.tier, entry.held, entry.offered = tier, held, offered
    assert sent.usable == usable
    sent.keep(own)
    assert sent.usable == (tier is not None and held == offered)
    sent.forget()
    assert not sent.usable
    entry.held = entry.offered = 0
    assert not sent.usable


def test_coding_takes_seconds_per_byte_of_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _, economy, _ = sent_shard()
    clock = iter([10.0, 10.5, 20.0, 20.25, 30.0])
    monkeypatch.setattr("fcdp.delta.sent.time.perf_counter", lambda: next(clock))
    own = torch.ones(64, dtype=torch.bfloat16)
    sent.keep(own)
    sent.read(sent.write(own), own)
    assert economy.encoding.value == 0.5 / own.nbytes
    assert economy.applied.value == 0.25 / own.nbytes
    sent.read(message.whole(own), own)


def test_a_shard_without_elements_is_sent_whole_and_tells_nothing_of_coding() -> None:
    sent, _, economy, _ = sent_shard()
    own = torch.empty(0)
    sent.keep(own)
    written = sent.write(own)
    assert message.is_whole(written)
    sent.read(written, own)
    assert economy.encoding.value is economy.applied.value is None


def test_a_unit_without_an_entry_stores_nothing_sent() -> None:
    unit: Any = StandInUnit("unit", 8)
    sent = Sent(Entry(unit), mock_economy())
    sent.keep(torch.ones(4))
    assert sent._memory is None


def test_what_does_not_pay_is_sent_whole_and_measured_again_at_times() -> None:
    sent, _, economy, own = sent_shard()
    expected = []
    for step in range(40):
        economy.pays.return_value = pays = step in (0, 34)
        sent.keep(own)
        economy.pays.reset_mock()
        for _ in range(3):  # each micro-batch agrees
            assert sent.would_send() == pays
        expected += [asked(economy.pays)[0]]
        if pays or step % 2:
            assert message.is_whole(sent.write(own)) != pays
            sent.saw(Watch([]), own, whole=not pays)
        else:  # no rank wished to
            sent.saw(Watch([]), own, whole=True, written=False)
    measured = [step for step, (ratio, _) in enumerate(expected) if ratio == 0.0]
    assert measured == [0, *range(17, 35)]  # sixteen whole ones later, until it pays
    assert len({ratio for ratio, _ in expected}) == 2


def test_a_shard_of_another_size_or_dtype_is_stored_anew() -> None:
    sent, _, _, own = sent_shard()
    for new in (own + 1, torch.randn(32).bfloat16(), torch.randn(32)):
        sent.keep(new)
        row = new.clone()
        sent.read(sent.write(new * 2), row)
        assert torch.equal(row, new * 2)


def test_another_version_is_an_error_that_names_the_unit() -> None:
    sent, entry, economy, own = sent_shard()
    written = sent.write(own)
    entry.offered = 5
    with pytest.raises(
        RuntimeError, match="unit: a difference from version 4 of a shard, of which 5"
    ):
        sent.read(written, own)
    sent.read(message.whole(own), own)
    assert economy.applied.value is None


def test_entropy_codes_are_sent_and_packed_ones_measured_again_at_times() -> None:
    sent, _, economy, own = sent_shard()
    economy.finer_pays.side_effect = lambda ratio, *_: ratio > 0
    for _ in range(20):
        sent.keep(own)
        changed = own + 1
        row = own.clone()
        assert message.read(sent.write(changed), row, 4)
        assert torch.equal(row, changed)
    packed = [step for step, (ratio, *_) in enumerate(asked(economy.finer_pays)) if ratio == 0.0]
    assert packed == [0, 17]  # sixteen others later
    assert economy.finer.value is not None
    _, after, nodes = asked(economy.finer_pays)[5]
    assert after > 0
    assert nodes == 2


def test_whole_shards_of_all_others_are_what_was_waited_for() -> None:
    sent, _, economy, own = sent_shard()
    watch = Watch([])
    watch.waited = 0.5
    sent.saw(watch, own, whole=True)
    assert asked(economy.saw_whole) == [(0.5, 2 * own.nbytes)]
    watch.took = 0.75
    sent.saw(watch, own, whole=False)
    assert asked(economy.saw_coded) == [(0.75, own.nbytes)]
    assert economy.saw_whole.call_count == 1


def test_units_that_cannot_be_coded_are_refused() -> None:
    def check(*dtypes: torch.dtype) -> None:
        unit: Any = SimpleNamespace(name="unit", gather_dtypes=frozenset(dtypes), packed={})
        fcdp.Delta().check([unit])

    check(torch.bfloat16)
    for dtypes in ((torch.int8,), (torch.float32, torch.bfloat16)):
        with pytest.raises(ValueError, match="unit gathers parameters of torch"):
            check(*dtypes)
    assert fcdp.Delta().when == "pays"
