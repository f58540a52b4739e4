"""Gathers on an accelerator's streams: no memory is read before it is written, nor reused too soon.

The library's own all-gather, cache and tiers run on a stand-in for streams and for the caching
allocator (tests/fcdp/accelerator.py), called as FSDP2 calls them: copy-in on one stream, gather on
another, copy-out on the computing stream, memory let go as soon as the host is done with it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.all_gather import CachedAllGather
from fcdp.cache.cache import Cache, Safety
from fcdp.cache.entry import Access, Entry, Slices
from fcdp.cache.memory_plan import MemoryPlan
from fcdp.cache.policy import CachePolicy, DeviceCache, HostCache, NoCache
from fcdp.gathering import Queued
from fcdp.ledger import Ledger
from fcdp.streams import Streams
from tests.fcdp.accelerator import Accelerator, Stream, alias
from tests.fcdp.stand_ins import Place, StandInUnit

DEVICE: Any = SimpleNamespace(type="stand-in")
NODES, NUMEL, GATHERS, ORDERS = 3, 4, 24, 12


@dataclass
class Other:
    """What the other ranks hold: shard (node, local rank) of a unit is one number, all over."""

    topology: Any
    values: dict[Any, int]

    def number(self, unit: Any, node: int, local_rank: int) -> int:
        return self.values[unit] * 100 + node * self.topology.ranks_per_node + local_rank


class Run:
    """One rank's gathers, and those that gave anything but what the parameters were."""

    def __init__(
        self, seed: int, policy: CachePolicy, ranks_per_node: int, *, by_rank: bool = False
    ) -> None:
        """``by_rank`` moves units inside the node as with many nodes."""
        self.by_rank = by_rank
        self.chance = random.Random(seed)
        self.accelerator = Accelerator()
        place: Any = Place(NODES, self.chance.randrange(NODES), ranks_per_node, local_rank=0)
        self.topology = place
        self.units: list[Any] = [StandInUnit(str(i), NUMEL * 4 * (1 + i % 2)) for i in range(4)]
        self.others = Other(place, dict.fromkeys(self.units, 1))
        self.wrong: list[Any] = []
        self.now: Any = None
        self.policy = policy
        self._made: list[Any] = []

    def __enter__(self) -> Run:
        self._stack = ExitStack()
        enter = self._stack.enter_context
        enter(self.accelerator.in_place_of_torchs())
        enter(mock.patch("fcdp.all_gather.all_gather", self._all_gather))
        if self.by_rank:
            enter(mock.patch("fcdp.all_gather.PARTS_MOST", 0))
        enter(mock.patch("fcdp.cache.arena.Arena", HostMemory))
        for user in ("tiers.host", "tiers.disk"):
            enter(mock.patch(f"fcdp.cache.{user}.Arena", HostMemory))
        streams = Streams(DEVICE)
        self.entries = {unit: Entry(unit) for unit in self.units}
        plan = MemoryPlan.of(
            self.units,
            self.topology,
            self.policy,
            look_ahead=self.chance.randint(0, 2),
            partials_place="device",
        )
        cache = Cache(
            self.entries,
            self.topology,
            DEVICE,
            streams,
            plan,
            Ledger(),
            directory=self.policy.directory,
            safety=Safety(),
        )
        cache.fallible = lambda unit: False  # type: ignore[method-assign]
        self.cache = cache
        slices = Slices(streams, streams.inter_node, kept=1)
        settled: Any = SimpleNamespace(settle=lambda unit: None)
        self.gathers = {
            unit: CachedAllGather(
                entry, self.topology, cache, slices, settled, None, streams, Ledger(), None
            )
            for unit, entry in self.entries.items()
        }
        self.copy_in, self.all_gather_stream = Stream(), Stream()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _all_gather(self, outputs: Any, group: str, inputs: Any = None) -> list[Any]:
        """Queue what a collective would do, from this rank's inputs and what others hold."""
        unit, others, topology = self.now, self.others, self.topology
        if group == "inter":
            (output,), (shard,) = outputs, inputs
            to, of = alias(output).view(NODES, -1), alias(shard)
            numbers = [others.number(unit, node, topology.local_rank) for node in range(NODES)]

            def cross() -> None:
                for node, number in enumerate(numbers):
                    to[node] = of if node == topology.node else number

            self.accelerator.issue(cross)
        else:
            pairs = [(alias(out), alias(row)) for out, row in zip(outputs, inputs, strict=True)]
            ranks = range(topology.ranks_per_node)
            numbers = [[others.number(unit, node, r) for r in ranks] for node in range(NODES)]
            nodes = [[node] for node in range(NODES)]
            if self.by_rank:
                own = topology.node
                runs = [[*range(own)], [*range(own + 1, NODES)], [own]]
                nodes = [run for run in runs if run]

            def spread() -> None:
                for (out, row), run in zip(pairs, nodes, strict=True):
                    parts = out.view(topology.ranks_per_node, len(run), -1)
                    for rank, place in product(ranks, range(len(run))):
                        mine = row.view(len(run), -1)[place]
                        other = numbers[run[place]][rank]
                        parts[rank, place] = mine if rank == topology.local_rank else other

            self.accelerator.issue(spread)
        return []

    def gather(self, unit: Any, *, async_op: bool) -> None:
        """Gather one unit as FSDP2 does, and note whether what came out is what was to come."""
        self.now = unit
        gather, topology, compute = self.gathers[unit], self.topology, self.accelerator.compute
        copy_in, stream = (compute, compute) if async_op else (self.copy_in, self.all_gather_stream)
        numel = unit.shard_bytes // 4
        mine = topology.node * topology.ranks_per_node + topology.local_rank
        with self.accelerator.stream(copy_in):
            output = gather.allocate(
                (topology.world_size * numel,), dtype=torch.int32, device=DEVICE
            )
            shard = output.view(-1, numel)[mine]
            number = self.others.number(unit, topology.node, topology.local_rank)
            own = alias(shard)
            self.accelerator.issue(lambda: own.fill_(number))
        stream.wait_stream(copy_in)
        with self.accelerator.stream(stream):
            work = gather(output, shard, None, async_op=async_op)  # type: ignore[arg-type]
            gathered = stream.record_event()
        if work is not None:
            work.wait()
        compute.wait_event(gathered)
        seen = alias(output).view(NODES, topology.ranks_per_node, numel)
        numbers = [
            [self.others.number(unit, node, rank) for rank in range(topology.ranks_per_node)]
            for node in range(NODES)
        ]
        expected = torch.tensor(numbers, dtype=torch.int32)[:, :, None].expand_as(seen)
        self.accelerator.issue(lambda: self.wrong.append(not torch.equal(seen, expected)))
        copied_out = compute.record_event()
        for each in (self.copy_in, self.all_gather_stream):
            each.wait_event(copied_out)

    def some_gathers(self) -> None:
        """Gather all units in one order per pass, most of them fresh; some change in between."""
        for _ in range(GATHERS // len(self.units)):
            self.cache.begin_pass()
            for unit in self.units:
                if self.chance.random() < 0.3:
                    self.others.values[unit] += 1
                    self.entries[unit].generation += 1
            for unit in self.chance.choice([self.units, self.units[::-1]]):
                self.gather(unit, async_op=self.chance.random() < 0.3)


class HostMemory:
    """An arena of ordinary memory."""

    def __init__(self, nbytes: int, device: Any, *, poison: bool = False) -> None:
        self._left = [torch.zeros(nbytes + 4096, dtype=torch.uint8)]

    def take(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def errors(seed: int, policy: CachePolicy, ranks_per_node: int, *, by_rank: bool = False) -> int:
    """Run one seed's gathers and count those with wrong data."""
    with Run(seed, policy, ranks_per_node, by_rank=by_rank) as run:
        run.some_gathers()
    run.accelerator.run_in_some_order(run.chance)
    assert len(run.wrong) == GATHERS
    return sum(run.wrong)


POLICIES = {"none": NoCache(), "device": DeviceCache(), "host": HostCache()}


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_that_events_allow_gives_what_the_parameters_are(
    policy: str, ranks_per_node: int
) -> None:
    assert not any(errors(seed, POLICIES[policy], ranks_per_node) for seed in range(ORDERS))


@pytest.mark.parametrize("policy", POLICIES)
def test_nor_do_parts_of_many_nodes_which_arrive_by_rank(policy: str) -> None:
    assert not any(errors(seed, POLICIES[policy], 2, by_rank=True) for seed in range(ORDERS))


@contextlib.contextmanager
def reading_at_once(access: Access, stream: Any) -> Iterator[None]:
    """A reader that does not wait for the last write."""
    yield
    access._reads[stream] = stream.record_event()


#: What a guard would be without its wait.
FORGOTTEN = {
    "the last write, by readers": mock.patch.object(Access, "reading", reading_at_once),
    "reads and writes, by writers and by memory let go": mock.patch.object(Access, "freed_for"),
    "readers of a slice, before its memory is let go": mock.patch.object(
        Slices, "drain", lambda slices, kept=0: slices._released.clear()
    ),
    "the copy-in, by the inter-node all-gather": mock.patch.object(Stream, "wait_stream"),
    "the gather, by who waits for its work": mock.patch.object(Queued, "wait"),
    "all events": mock.patch.object(Stream, "wait_event"),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_forgotten_wait_shows(forgotten: str) -> None:
    with FORGOTTEN[forgotten]:
        assert any(errors(seed, HostCache(), 2) for seed in range(4 * ORDERS))


def memory_after(passes: int, policy: CachePolicy, ranks_per_node: int) -> tuple[int, int]:
    """Bytes of device memory that passes have taken, and one unit's slice; nothing has run yet."""
    with Run(0, policy, ranks_per_node) as run:
        run.units[:] = run.units[::2]  # of one size
        for _ in range(passes):
            run.cache.begin_pass()
            for unit in run.units:
                run.entries[unit].generation += 1
                run.gather(unit, async_op=False)
            for unit in run.units[::-1]:
                run.gather(unit, async_op=False)
        return run.accelerator.allocated_bytes, NODES * run.units[0].shard_bytes


@pytest.mark.parametrize("ranks_per_node", [1, 2, 8])
def test_device_memory_is_two_slices_and_what_is_fetched_ahead_however_far_the_host_runs(
    ranks_per_node: int,
) -> None:
    """With ``record_stream`` each gather would take new memory until the device has caught up."""
    plain, size = memory_after(6, NoCache(), ranks_per_node)
    one, _ = memory_after(1, HostCache(), ranks_per_node)
    many, _ = memory_after(6, HostCache(), ranks_per_node)
    assert many <= plain + 4 * size
    assert many <= one + 4 * size


def test_what_was_fetched_ahead_for_another_path_is_let_go_when_the_next_pass_begins() -> None:
    """It would keep device memory, and others from being fetched ahead, until it is read."""
    with Run(0, HostCache(), 2) as run:
        run.cache._look_ahead = 1
        first, skipped, *_ = run.units
        for _ in range(2):
            run.cache.begin_pass()
            run.gather(first, async_op=False)
            run.gather(skipped, async_op=False)
        run.cache.begin_pass()
        run.gather(first, async_op=False)
        assert run.entries[skipped].staged is not None
        run.cache.begin_pass()
        assert run.entries[skipped].staged is None
    run.accelerator.run_in_some_order(run.chance)
    assert not any(run.wrong)
