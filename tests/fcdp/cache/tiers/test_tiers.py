"""What every tier promises, and the host arena: what is taken beyond the plan, poison."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcdp.cache.tiers.device import DeviceTier
from fcdp.cache.tiers.disk import DiskTier
from fcdp.cache.tiers.host import HostTier
from fcdp.cache.tiers.tier import TierUnavailable
from tests.fcdp.stand_ins import CPU, STREAMS, Place, StandInUnit, slice_of


def make(kind: str, units: list[Any], place: Any, directory: Path) -> Any:
    if kind == "device":
        return DeviceTier(place, CPU, STREAMS)
    if kind == "host":
        return HostTier(units, place, CPU, STREAMS, poison=False)
    return DiskTier(units, place, CPU, STREAMS, directory, buffers=2)


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
@settings(max_examples=25)
@given(
    numels=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    nodes=st.integers(2, 5),
    data=st.data(),
)
def test_what_is_stored_comes_back_and_the_own_row_is_left_alone(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    numels: list[int],
    nodes: int,
    data: st.DataObject,
) -> None:
    node = data.draw(st.integers(0, nodes - 1))
    units = [StandInUnit(str(index), 4 * numel) for index, numel in enumerate(numels)]
    tier = make(kind, units, Place(nodes, node), tmp_path_factory.getbasetemp())
    stored = [torch.randn(nodes, numel) for numel in numels]
    for _ in range(2):  # the second time overwrites
        for unit, shards in zip(units, stored, strict=True):
            tier.store(unit, slice_of(shards, node))
        order = data.draw(st.permutations(range(len(units))))
        expected = data.draw(st.lists(st.sampled_from(units), max_size=3))
        for unit in expected:
            tier.expect(unit)
        for index in order:
            loaded = torch.full_like(stored[index], torch.nan)
            assert tier.intact(units[index])
            tier.load(units[index], slice_of(loaded, node))
            assert loaded[node].isnan().all()
            others = [other for other in range(nodes) if other != node]
            assert torch.equal(loaded[others], stored[index][others])
        stored = [2 * shards for shards in stored]
        for unit in units:
            tier.drop(unit)


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_an_entry_holds_any_dtype_that_the_unit_gathers(tmp_path: Path, kind: str) -> None:
    odd: Any = StandInUnit("odd", 3)
    unit: Any = StandInUnit("unit", 6)
    tier = make(kind, [odd, unit], Place(2, 0), tmp_path)
    shards = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)
    tier.store(unit, slice_of(shards))
    loaded = torch.zeros_like(shards)
    assert tier.intact(unit)
    tier.load(unit, slice_of(loaded))
    assert torch.equal(loaded[1], shards[1])


def test_a_full_device_is_asked_once_per_unit() -> None:
    """Each refusal empties the allocator's reserve and waits for the device."""
    full, unit = StandInUnit("full", 4), StandInUnit("other", 8)
    units: Any = full, unit
    tier = DeviceTier(Place(2, 0), CPU, STREAMS)  # type: ignore[arg-type]
    refusing = mock.patch("torch.empty", side_effect=torch.OutOfMemoryError)
    with refusing as asked:
        for _ in range(3):
            with pytest.raises(TierUnavailable):
                tier.store(units[0], slice_of(torch.zeros(2, 1)))
    assert asked.call_count == 1
    tier.store(units[1], slice_of(torch.zeros(2, 2)))
    assert tier.nbytes == 8


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
