"""The host cache on a GPU: page-locked, ordered by events, no copy that waits for compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fcdp.cache.tiers.host import HostTier
from tests.fcdp.stand_ins import Entry, Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_tier(units: list[Any], look_ahead: int = 0) -> HostTier:
    place: Any = Place(nodes=2, node=0)
    return HostTier(units, place, torch.device("cuda", 0), look_ahead=look_ahead, poison=True)


def test_the_arena_is_page_locked() -> None:
    unit: Any = Entry("unit", 1 << 20)
    assert make_tier([unit])._entries[unit].shards.is_pinned()


def test_an_entry_is_read_after_its_copy_has_landed() -> None:
    """The copy out is held back by a long kernel; the copy in must wait for it by itself."""
    unit: Any = Entry("unit", 4 << 20)
    tier = make_tier([unit])
    shards = [torch.full((1 << 20,), float(node), device="cuda") for node in range(2)]
    with torch.cuda.stream(tier._copies_out):
        torch.cuda._sleep(200_000_000)
    tier.store(unit, shards)
    loaded = [torch.full_like(shard, -1.0) for shard in shards]
    tier.load(unit, loaded)
    torch.cuda.synchronize()
    assert torch.equal(loaded[1], shards[1])
    assert (loaded[0] == -1).all()


def test_an_entry_is_overwritten_after_its_last_read() -> None:
    unit: Any = Entry("unit", 4 << 20)
    tier = make_tier([unit])
    first = [torch.full((1 << 20,), 1.0, device="cuda") for _ in range(2)]
    tier.store(unit, first)
    torch.cuda.synchronize()
    reader = torch.cuda.Stream()
    loaded = [torch.zeros_like(shard) for shard in first]
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(200_000_000)
        tier.load(unit, loaded)
    tier.store(unit, [torch.full_like(shard, 2.0) for shard in first])
    torch.cuda.synchronize()
    assert (loaded[1] == 1).all()


def test_storing_does_not_hold_up_the_current_stream() -> None:
    unit: Any = Entry("unit", 64 << 20)
    tier = make_tier([unit])
    shards = [torch.ones(16 << 20, device="cuda") for _ in range(2)]
    with torch.cuda.stream(tier._copies_out):
        torch.cuda._sleep(2_000_000_000)
    tier.store(unit, shards)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not tier._copies_out.query(), "the copy had to wait, the current stream must not"
    torch.cuda.synchronize()


def test_an_expected_entry_is_staged_beside_what_runs_and_then_taken() -> None:
    unit: Any = Entry("unit", 64 << 20)
    tier = make_tier([unit], look_ahead=1)
    shards = [torch.full((16 << 20,), float(node), device="cuda") for node in range(2)]
    tier.store(unit, shards)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # the current stream is busy
    tier.expect(unit)
    tier._copies_in.synchronize()  # and yet the copy ends
    assert not torch.cuda.current_stream().query()
    loaded = [torch.full_like(shard, -1.0) for shard in shards]
    tier.load(unit, loaded)
    assert tier._staging[0].unit is None
    torch.cuda.synchronize()
    assert torch.equal(loaded[1], shards[1])


def test_what_was_staged_before_a_store_is_not_served_after_it() -> None:
    unit: Any = Entry("unit", 4 << 20)
    tier = make_tier([unit], look_ahead=1)
    for value in (1.0, 2.0):
        shards = [torch.full((1 << 20,), value, device="cuda") for _ in range(2)]
        tier.store(unit, shards)
        tier.expect(unit)
    loaded = [torch.zeros_like(shard) for shard in shards]
    tier.load(unit, loaded)
    torch.cuda.synchronize()
    assert (loaded[1] == 2).all()
