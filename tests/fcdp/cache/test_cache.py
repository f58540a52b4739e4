"""The cache on ranks: refusals, falls to the next tier, verification.

It also foresees the next gathers from the pass before.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fcdp
from fcdp.arena import Arena
from fcdp.cache.memory import Usage
from fcdp.cache.tiers import DeviceTier, DiskTier, HostTier, TierUnavailable
from fcdp.engine import engine_of
from fcdp.exchange import any_rank
from fcdp.pass_controller import GatherOrder
from fcdp.streams import Slice
from tests.fcdp.training import Run, Settings, captured, make_model, topology_of
from tests.ranks import Pools, on_ranks

HOST_PARTIALS = fcdp.CommOptions(partial_gradients="host")


def tiers(run: Run) -> dict[str, str | None]:
    engine = engine_of(run.model)
    return {unit.name: engine.entries[unit].tier for unit in engine.units}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "cache 12 KiB"),
        ({"policy": fcdp.NoCache(), "comm": HOST_PARTIALS}, "partial gradients 12 KiB"),
        ({"policy": fcdp.DiskCache(Path(tempfile.gettempdir()))}, "disk buffers 12 KiB"),
    ],
)
@on_ranks(2)
def test_too_little_host_memory_is_refused_on_all_ranks(options: dict[str, Any], part: str) -> None:
    """Only rank 1's node is short of memory; no rank may wait for another, nor take any."""
    model, topology = make_model(Settings()), topology_of(2, 1)
    short = topology.rank == 1
    free = 100 if short else 2**40
    with (
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=free),
        mock.patch.object(Arena, "__init__", autospec=True) as arena,
        pytest.raises(ValueError, match="host memory are free") as error,
    ):
        fcdp.shard(model, topology, units=model.blocks, **options)
    assert (part if short else "host memory: rank 1: fcdp: ") in str(error.value), error.value
    assert arena.call_count == 0


@on_ranks(2)
def test_what_the_device_cannot_take_goes_to_the_host_with_one_warning() -> None:
    """The device takes one entry and no more."""
    allocate = DeviceTier._take

    def once(tier: DeviceTier, unit: Any) -> torch.Tensor:
        if tier._areas:
            with mock.patch("torch.empty", side_effect=torch.OutOfMemoryError):
                return allocate(tier, unit)
        return allocate(tier, unit)

    run = Run(Settings(2, 1, policy=fcdp.DeviceCache()))
    with mock.patch.object(DeviceTier, "_take", once), torch.no_grad(), captured() as (_, warned):
        run.loss()
    assert tiers(run) == {"root": "device", "blocks.0": "host", "blocks.1": "host"}
    lines = [line for line in warned.getvalue().splitlines() if "device cache" in line]
    assert run.topology.rank or lines == [
        "device cache: the device has no 0.0 MiB free for blocks.0; "
        "using the next tier for what does not fit"
    ]


@on_ranks(2)
def test_ranks_ask_once_whether_all_keep_a_unit_on_the_device() -> None:
    device = fcdp.DeviceCache()
    run = Run(Settings(2, 1, adapter_rank=3, reshard_after_forward=True, policy=device))
    asked = []
    with mock.patch("fcdp.pass_controller.any_rank", wraps=any_rank) as question:
        for _ in range(3):
            run.step()
            asked.append(sum(len(call.args[0]) == 1 for call in question.call_args_list))
    assert 0 < asked[0] <= asked[1] == asked[2], asked


@on_ranks(2)
def test_nobody_asks_for_what_every_rank_knows_is_stale(tmp_path: Path) -> None:
    run = Run(Settings(2, 1, policy=fcdp.DiskCache(tmp_path)))
    engine = engine_of(run.model)
    with torch.no_grad():
        run.loss()
    with mock.patch("fcdp.pass_controller.any_rank", wraps=any_rank) as question:
        for entry in engine.entries.values():
            entry.generation += 1
            decision = engine.controller.before_gather(entry, "backward", resized=False)
            assert not decision.hit
            assert decision.keep
    assert question.call_count == 0


@on_ranks(2)
def test_what_ranks_agree_on_for_a_gather_is_one_exchange(tmp_path: Path) -> None:
    """A pass's first gather asks for its own entry with what it asks of all units."""
    run = Run(Settings(2, 1, policy=fcdp.DiskCache(tmp_path)))
    engine = engine_of(run.model)
    with torch.no_grad():
        run.loss()
        with mock.patch("fcdp.pass_controller.any_rank", wraps=any_rank) as question:
            run.loss()
    first, *others = (len(call.args[0]) for call in question.call_args_list)
    assert first == 2 * len(engine.units) + 2  # whether this rank asks, and what it lacks
    assert others == [1] * (engine.ledger.hits - 1)


@on_ranks(2)
def test_a_device_entry_is_overwritten_in_place() -> None:
    """Each is allocated once in three steps of full fine-tuning."""
    run = Run(Settings(2, 1, reshard_after_forward=True, policy=fcdp.DeviceCache()))
    with mock.patch.object(
        DeviceTier, "_take", autospec=True, side_effect=DeviceTier._take
    ) as allocate:
        for _ in range(3):
            run.step()
    assert allocate.call_count == 3


@on_ranks(2)
def test_ranks_may_choose_different_tiers() -> None:
    """They begin the forward with different memory in use; each entry on the device adds to it.

    They ask the allocator once per step.
    """
    run = Run(Settings(2, 1, policy=fcdp.Threshold(0.5), reshard_after_forward=True))
    root, first, _ = engine_of(run.model).units
    total = 2 * (root.shard_bytes + (1 - run.topology.rank) * first.shard_bytes) + 2
    used = Usage(1, 0, total)
    with mock.patch("fcdp.cache.cache.device_usage", return_value=used) as asked:
        run.loss().backward()
    placed = [*tiers(run).values()]
    assert placed == ["device", "host" if run.topology.rank else "device", "host"], placed
    assert asked.call_count == 1


@on_ranks(2)
def test_a_threshold_sees_what_forward_has_taken_by_then() -> None:
    """Otherwise it would fill a device that was nearly empty as forward began.

    As on an accelerator, tensors take half of it while the second unit is stored.
    """
    run = Run(Settings(2, 1, policy=fcdp.Threshold(0.5), reshard_after_forward=True))
    tensors = iter([10, 10, 50, 80])
    with (
        mock.patch("fcdp.cache.cache.device_usage", return_value=Usage(20, 20, 100)) as asked,
        mock.patch("fcdp.cache.cache.allocated_bytes", side_effect=lambda _: next(tensors)),
    ):
        run.loss().backward()
    placed = [*tiers(run).values()]
    assert placed == ["device", "host", "host"], placed
    assert asked.call_count == 1


@on_ranks(2)
def test_auto_moves_entries_to_the_device_and_back() -> None:
    """It asks the allocator once per step, not at each load."""
    used, placed = [0], []
    with mock.patch(
        "fcdp.cache.cache.device_usage", side_effect=lambda _: Usage(used[0], used[0], 10**6)
    ) as asked:
        run = Run(Settings(2, 1, adapter_rank=3, reshard_after_forward=True, policy=fcdp.Auto()))
        for used[0] in (0, 0, 0, 10**6, 0):
            run.loss().backward()
            placed.append(tiers(run)["blocks.0"])
            assert asked.call_count == len(placed)
    assert placed == ["host", "host", "device", "host", "host"], placed


def breaking(what: str, step: int) -> ExitStack:
    """Have this rank keep nothing in memory, or have its disk fail in mid-run."""
    stack = ExitStack()
    if what == "memory":  # neither device nor host takes an entry that was meant for the device
        for tier, method in ((DeviceTier, "_take"), (HostTier, "_take")):
            refuse = mock.patch.object(tier, method, side_effect=TierUnavailable("is full"))
            stack.enter_context(refuse)
    elif what == "disk" and step in (1, 2):
        for name in ("pwritev", "preadv"):
            failing = OSError(errno.ENOSPC, "made up")
            stack.enter_context(mock.patch.object(os, name, side_effect=failing))
    return stack


def train_where(what: str, policy: fcdp.CachePolicy) -> tuple[list[float], int, int]:
    """Return losses, hits and misses, while something breaks on rank 1."""
    run = Run(Settings(2, 1, adapter_rank=3, reshard_after_forward=True, policy=policy))
    losses = []
    for step in range(4):
        with breaking(what if run.topology.rank == 1 else "", step):
            losses.append(run.step())
    counts = fcdp.ledger(run.model)
    return losses, counts.hits, counts.misses


def test_what_one_rank_cannot_keep_costs_gathers_and_nothing_else(
    ranks: Pools, tmp_path: Path
) -> None:
    disk = fcdp.DiskCache(tmp_path)
    on_host, healthy = (ranks.run(2, train_where, "", each) for each in (fcdp.HostCache(), disk))
    assert healthy == on_host
    expected = [losses for losses, _, _ in on_host]
    for what, policy in (
        ("memory", fcdp.DeviceCache()),
        ("memory", fcdp.Budget(device=10**9)),
        ("disk", disk),
    ):
        broken = ranks.run(2, train_where, what, policy)
        assert [losses for losses, _, _ in broken] == expected
        assert broken[0][1:] == broken[1][1:], "ranks disagree about hits"
        assert broken[0][2] > healthy[0][2]
        assert what == "disk" or broken[0][1] == 0


@on_ranks(2)
def test_verify_names_unit_rank_and_generation() -> None:
    run = Run(Settings(2, 1, verify=True))
    engine, rank = engine_of(run.model), run.topology.rank
    loss = run.loss()
    engine.cache._host_tier._areas[engine.units[1]].rows[0, 5] ^= 1
    other = rf"^blocks\.0: rank {rank} read from the host cache other bytes.*generation 2"
    with pytest.raises(RuntimeError, match=other):
        loss.backward()


@on_ranks(2)
def test_verify_reads_what_was_written_and_memory_is_used_anew_behind_it() -> None:
    """Flat, no gather inside the node reads the slice afterwards on the same stream."""
    cache = engine_of(Run(Settings(2, 1, verify=True)).model).cache
    writer, reader = mock.Mock(), mock.Mock()
    writer.record_event.return_value, reader.record_event.return_value = "written", "read"
    received = Slice(torch.zeros(2, 4), 0, writer)
    received.access.note_write(writer)
    with mock.patch.object(cache._streams, "current", return_value=reader):
        cache._checksums(received)
    reader.wait_event.assert_called_once_with("written")
    assert received.access.events() == ["written", "read"]


@pytest.mark.parametrize(
    ("gradients", "micro_batches", "tier"), [(True, 1, None), (True, 2, "host"), (False, 1, "host")]
)
@on_ranks(2)
def test_what_no_gather_of_the_step_reads_again_is_not_stored(
    gradients: bool, micro_batches: int, tier: str | None
) -> None:
    """FSDP2 keeps the root gathered from forward to backward, and the step makes it stale."""
    run = Run(Settings(2, 1))
    for _ in range(2):
        for micro in range(micro_batches):
            with torch.set_grad_enabled(gradients), ExitStack() as stack:
                if gradients and micro_batches > 1:
                    last = micro == micro_batches - 1
                    stack.enter_context(fcdp.accumulate(run.model, last=last))
                loss = run.loss()
                if gradients:
                    loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert tiers(run)["root"] == tier


@on_ranks(2)
def test_stale_entries_are_not_fetched_ahead(tmp_path: Path) -> None:
    run = Run(Settings(2, 1, policy=fcdp.DiskCache(tmp_path)))
    cache = engine_of(run.model).cache
    with torch.no_grad():
        run.loss()
    entries, counts = [*cache._entries.values()], []
    with mock.patch.object(DiskTier, "expect") as expect:
        for _ in range(2):
            cache.expect(entries)
            counts.append(expect.call_count)
            for entry in entries:  # as the ranks agree when a pass begins
                entry.generation += 1
    assert counts == [3, 3], "those that are fresh"


@on_ranks(2)
def test_a_profiler_sees_of_which_unit_each_load_is() -> None:
    """At its gather, or ahead of that as on an accelerator."""
    run = Run(Settings(2, 1))
    cache = engine_of(run.model).cache
    opened: list[str] = []
    loads: list[tuple[str, list[str]]] = []
    load = HostTier.load

    @contextmanager
    def profiled(part: str, of: str) -> Iterator[None]:
        opened.append(f"{part} {of}")
        yield
        opened.pop()

    def noting(tier: HostTier, unit: Any, target: Any) -> None:
        loads.append((unit.name, [*opened]))
        load(tier, unit, target)

    with (
        torch.no_grad(),
        mock.patch("fcdp.cache.cache.profiled", profiled),
        mock.patch.object(HostTier, "load", noting),
    ):
        for _ in range(2):
            run.loss()
        with mock.patch.object(cache._streams, "on_host", False):
            cache.expect([*cache._entries.values()])
    # The root stays gathered, so that no gather loads it. It is the first entry, and ``look_ahead``
    # is 1.
    names = ["blocks.0", "blocks.1", "root"]
    assert loads == [(name, [f"cache_load {name}"]) for name in names]


PASS = "abcba"
#: Passes one after another: their units, how far ahead is looked, whether they compute gradients,
#: and what is foreseen at each unit.
Passes = list[tuple[str, int, bool, list[str]]]
LEARNT: Passes = [(PASS, 2, True, [""] * 5)]
FORESEEN = ["bc", "cb", "ba", "a", ""]
ORDERS: dict[str, Passes] = {
    "the second is foreseen": [(PASS, 2, True, FORESEEN)],
    "another way foresees nothing from there": [("accbab", 2, True, ["bc", "", "ba", "a", "", ""])],
    "nothing gathered erases nothing": [
        ("", 2, True, []),
        (PASS, 1, True, ["b", "c", "b", "a", ""]),
    ],
    "an evaluation makes no step unknown": [
        ("abc", 2, False, [""] * 3),
        (PASS, 2, True, FORESEEN),
        ("abc", 2, False, ["bc", "c", ""]),
    ],
}


@pytest.mark.parametrize("passes", ORDERS.values(), ids=ORDERS)
def test_a_pass_is_foreseen_as_the_one_before_was(passes: Passes) -> None:
    order = GatherOrder()
    for units, depth, gradients, foreseen in [*LEARNT, *passes]:
        order.begin(gradients)
        ahead = ["".join(map(str, order.note(unit, depth))) for unit in units]  # type: ignore[arg-type]
        assert ahead == foreseen
