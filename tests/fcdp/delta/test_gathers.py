"""Differences in gathers: what the ranks agree on, what is kept, and when the cache is read."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.cache.cache import Entry
from fcdp.delta import message
from fcdp.delta.gathers import Differences
from fcdp.delta.on_device import Counts, Encodings
from fcdp.delta.sent import Sent
from fcdp.streams import Slice, Streams
from scripts.fake_world import DeviceStreams
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit, slice_of


def differences(
    *trainable: bool, streams: Streams = STREAMS, nodes: int = 2
) -> tuple[Differences, list[Any]]:
    """Differences of units that are trained, or not, and the units."""
    units: list[Any] = [
        StandInUnit(str(at), 8, topology=Place(nodes, 0)) for at in range(len(trainable))
    ]
    for unit, is_trained in zip(units, trainable, strict=True):
        unit.trainable = is_trained
    parts: Any = SimpleNamespace(
        entries={unit: Entry(unit) for unit in units}, streams=streams, cache=mock.Mock()
    )
    return Differences("pays", parts), units


@pytest.mark.parametrize(
    ("first", "second"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_rank_votes_for_differences_if_it_would_send_one_of_a_trained_unit(
    first: bool, second: bool
) -> None:
    made, units = differences(True, True, False)
    would = dict(zip(map(made._bases.get, units), (first, second, True), strict=True))
    with mock.patch.object(Sent, "would_send", lambda base: would[base]):
        assert made.votes() == [False, first or second]
        made._economy = mock.Mock(faster=True)
        assert made.votes() == [True, first or second]


def test_ranks_send_differences_of_trained_units_where_they_agreed_to() -> None:
    made, (trained, frozen) = differences(True, False)
    made._economy = economy = mock.Mock()
    made.agreed([False, True])
    assert (made.wants(trained), made.wants(frozen)) == (True, False)
    assert not economy.measure_again.called
    made.agreed([True, False])
    assert (made.wants(trained), made.wants(frozen)) == (False, False)
    assert economy.measure_again.call_count == 1


def kept(made: Differences, unit: Any) -> torch.Tensor:
    """Have all ranks keep a shard, and return it."""
    base = made._bases[unit]
    base.entry.tier, base.entry.held, base.entry.offered = "host", 1, 1
    own = torch.randn(64)
    base.keep(own)
    assert not made.lacks_base(unit)
    return own


@pytest.mark.parametrize("difference", [True, False])
def test_a_gather_that_was_given_up_leaves_no_base(difference: bool) -> None:
    """Other nodes may have taken what it sent."""
    made, (unit,) = differences(True)
    own, hook, received = kept(made, unit), made.hook(unit), slice_of(torch.empty(2, 64))
    hook.prepare(received, "forward", difference=difference)
    hook.encode(own, received)
    assert made.lacks_base(unit)


@pytest.mark.parametrize("sending", [True, False])
def test_on_an_accelerator_a_shard_is_kept_where_ranks_send_differences(sending: bool) -> None:
    made, (unit,) = differences(True, streams=DeviceStreams(CPU))
    own, hook = kept(made, unit), made.hook(unit)
    made.agreed([False, sending])
    hook.prepare(slice_of(torch.empty(2, 64)), "forward", difference=False)
    assert made.lacks_base(unit)
    hook.stored(own)
    assert made.lacks_base(unit) is not sending


@pytest.mark.parametrize("theirs_coded", [True, False])
@pytest.mark.parametrize("mine_coded", [True, False])
@pytest.mark.parametrize("fallible", [True, False])
def test_the_cache_is_read_once_where_a_difference_arrives_and_at_once_where_it_may_be_lost(
    fallible: bool, mine_coded: bool, theirs_coded: bool
) -> None:
    """Of two other nodes, the last of which sends its shard whole."""
    made, (unit,) = differences(True, nodes=3)
    own, hook, base = kept(made, unit), made.hook(unit), made._bases[unit]
    base.entry.fallible = fallible
    base._economy = economy = mock.Mock()
    economy.pays.return_value, economy.finer_pays.return_value = mine_coded, False
    before = torch.randn(64)
    after = before * 1.01
    theirs = message.write(after, before, 1) if theirs_coded else message.whole(after)

    def load(entry: Entry, phase: str, target: Slice) -> None:
        target.memory[1:].copy_(before)

    hook._cache.load_stale = loads = mock.Mock(side_effect=load)
    received = slice_of(torch.empty(3, 64))
    hook.prepare(received, "forward", difference=True)
    assert loads.call_count == fallible
    _, messages = hook.encode(own * 1.01, received)
    for message_of, written in zip(messages[1:], (theirs, message.whole(after)), strict=True):
        message_of[: len(written)] = written
    (arriving,) = hook.sent([])
    arriving.wait()
    hook.decode(messages, received)
    assert torch.equal(received.memory[1:], after.expand(2, -1))
    all_whole = not (mine_coded or theirs_coded)
    assert loads.call_count == (fallible or theirs_coded)
    assert (economy.saw_whole.call_count, economy.saw_coded.call_count) == (
        all_whole,
        not all_whole,
    )


def test_each_nodes_message_has_room_and_begins_at_a_multiple_of_64_bytes() -> None:
    made, (unit,) = differences(True)
    hook = made.hook(unit)
    made._bases[unit]._economy = mock.Mock(**{"pays.return_value": False})
    for numel in range(1, 70):
        kept(made, unit)
        own, received = torch.randn(numel), slice_of(torch.empty(2, numel))
        hook.prepare(received, "forward", difference=True)
        _, room = hook.encode(own, received)
        assert room.shape == (2, math.ceil(message.most_bytes(own) / 64) * 64)


def test_after_sixteen_exchanges_of_whole_shards_differences_are_measured_anew() -> None:
    made, (unit,) = differences(True)
    own, hook, base = kept(made, unit), made.hook(unit), made._bases[unit]
    base._economy, base._ratio = mock.Mock(), 0.5
    received = slice_of(torch.empty(2, 64))
    for _ in range(16):
        base.would_send()
        hook.prepare(received, "forward", difference=False)
        hook.encode(own, received)
        hook.sent([])
        hook.decode(received.memory, received)
    base.would_send()
    expected = [mock.call(0.5, 1)] * 16 + [mock.call(0.0, 1)]
    assert base._economy.pays.mock_calls == expected
    assert base._economy.saw_whole.mock_calls == [mock.call(0.0, own.nbytes)] * 16


class Learning:
    """Notes what is queued while the ranks learn what has changed, which is nothing."""

    def __init__(self, *nodes: int) -> None:
        """Each unit's shards are on so many nodes."""
        self.done = done = mock.Mock()
        streams: Any = DeviceStreams(CPU)
        streams.current = lambda: "current"
        streams.inter_node, streams.on = done.inter_node, done.on
        done.on.return_value = nullcontext()
        done.count.return_value = torch.zeros(len(Counts._fields), dtype=torch.int64)
        done.all_gather.side_effect = lambda outputs, group, inputs: outputs[0].zero_()
        self.made, units = differences(*[True] * len(nodes), streams=streams)
        places = {count: Place(count, 0) for count in nodes}
        for unit, count in zip(units, nodes, strict=True):
            unit.topology = places[count]
            unit.shard, unit.shard_numel = lambda device: torch.zeros(64), 64
            kept(self.made, unit)
            entry = self.made._bases[unit].entry
            entry.based, entry.generation = True, 2
        self.made._encodings = Encodings([*self.made._bases.values()], streams)

    def run(self) -> None:
        names = {"count": self.done.count, "all_gather": self.done.all_gather}
        with mock.patch.multiple("fcdp.delta.on_device", **names):
            self.made.agreed([False, True])


def test_shards_are_counted_behind_what_wrote_them_and_then_cross_nodes() -> None:
    learning = Learning(2)
    learning.run()
    done = learning.done
    calls = [name for name, *_ in done.mock_calls]
    assert calls[:4] == ["inter_node.wait_stream", "on", "count", "all_gather"]
    assert done.inter_node.wait_stream.call_args == mock.call("current")
    assert done.on.call_args == mock.call(done.inter_node)
    assert done.all_gather.call_args.args[1] == "inter"


def test_counts_of_units_on_more_nodes_than_others_land_too() -> None:
    learning = Learning(4, 4, 2)
    learning.run()
    assert learning.done.all_gather.call_count == 2
