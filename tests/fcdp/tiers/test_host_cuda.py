"""The host cache on a GPU: page-locked, ordered by events, no copy that waits for compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fcdp.cache import _HostTier
from tests.fcdp.test_cache import Entry, Place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_tier(units: list[Any]) -> _HostTier:
    place: Any = Place(nodes=2, node=0)
    return _HostTier(units, place, torch.device("cuda", 0))


def test_the_arena_is_page_locked() -> None:
    assert make_tier([Entry("unit", 1 << 20)])._arena.memory.is_pinned()


def test_an_entry_is_read_after_its_copy_has_landed() -> None:
    """The copy out is held back by a long kernel; the copy in must wait for it by itself."""
    unit = Entry("unit", 4 << 20)
    tier = make_tier([unit])
    tier._arena.memory.fill_(0xFF)  # a float of these bytes is NaN
    shards = [torch.full((1 << 20,), float(node), device="cuda") for node in range(2)]
    with torch.cuda.stream(tier._copies_out):
        torch.cuda._sleep(200_000_000)
    tier.store(unit, shards, 1)  # type: ignore[arg-type]
    loaded = [torch.full_like(shard, -1.0) for shard in shards]
    tier.load(unit, loaded)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    assert torch.equal(loaded[1], shards[1])
    assert (loaded[0] == -1).all()


def test_an_entry_is_overwritten_after_its_last_read() -> None:
    unit = Entry("unit", 4 << 20)
    tier = make_tier([unit])
    first = [torch.full((1 << 20,), 1.0, device="cuda") for _ in range(2)]
    tier.store(unit, first, 1)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    reader = torch.cuda.Stream()
    loaded = [torch.zeros_like(shard) for shard in first]
    reader.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(reader):
        torch.cuda._sleep(200_000_000)
        tier.load(unit, loaded)  # type: ignore[arg-type]
    tier.store(unit, [torch.full_like(shard, 2.0) for shard in first], 2)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    assert (loaded[1] == 1).all()


def test_storing_does_not_hold_up_the_current_stream() -> None:
    unit = Entry("unit", 64 << 20)
    tier = make_tier([unit])
    shards = [torch.ones(16 << 20, device="cuda") for _ in range(2)]
    with torch.cuda.stream(tier._copies_out):
        torch.cuda._sleep(2_000_000_000)
    tier.store(unit, shards, 1)  # type: ignore[arg-type]
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not tier._copies_out.query(), "the copy had to wait, the current stream must not"
    torch.cuda.synchronize()
