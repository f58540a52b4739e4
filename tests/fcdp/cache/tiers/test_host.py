"""The host arena: its size, what is taken beyond the plan, poison."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fcdp.cache.tiers.host import HostTier
from fcdp.cache.tiers.tier import TierUnavailable
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit, slice_of

PLACE: Any = Place(2, 0)


def make_tier(*planned: Any, poison: bool = False) -> HostTier:
    return HostTier(planned, PLACE, CPU, STREAMS, poison=poison)


def test_a_unit_beyond_the_plan_takes_memory_of_its_own() -> None:
    planned, late = StandInUnit("planned", 8), StandInUnit("late", 8)
    tier = make_tier(planned)
    shards = torch.arange(4.0).view(2, 2)
    before = tier.nbytes
    tier.store(late, slice_of(shards))  # type: ignore[arg-type]
    loaded = torch.zeros_like(shards)
    tier.load(late, slice_of(loaded))  # type: ignore[arg-type]
    assert torch.equal(loaded[1], shards[1])
    assert tier.nbytes == before + 8


def test_a_unit_beyond_the_plan_and_beyond_memory_is_turned_away() -> None:
    tier = make_tier()
    unit: Any = StandInUnit("late", 8)
    with (
        mock.patch("fcdp.cache.memory.available_host_memory", return_value=7),
        pytest.raises(TierUnavailable, match="no 0.0 MiB free"),
    ):
        tier.store(unit, slice_of(torch.zeros(2, 2)))


def test_poison_shows_in_an_entry_that_was_dropped() -> None:
    unit: Any = StandInUnit("unit", 8)
    tier = make_tier(unit, poison=True)
    loaded = torch.zeros(2, 2)
    for _ in range(2):
        tier.load(unit, slice_of(loaded))
        assert loaded[1].isnan().all()
        tier.store(unit, slice_of(torch.ones(2, 2)))
        tier.load(unit, slice_of(loaded))
        assert (loaded[1] == 1).all()
        tier.drop(unit)
