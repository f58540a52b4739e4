"""Which tier each policy chooses, by arithmetic alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fcdp
from fcdp.cache.memory import Usage
from tests.fcdp.stand_ins import Place, StandInUnit

PLACE: Any = Place(2, 0)


def place(policy: fcdp.CachePolicy, units: list[Any]) -> Any:
    return policy.place(units, PLACE)


def usage(used: int, total: int = 100) -> Usage:
    return Usage(used, used, total)


def test_policies_are_values_that_travel() -> None:
    for policy in (
        fcdp.HostCache(),
        fcdp.NoCache(),
        fcdp.DeviceCache(),
        fcdp.DiskCache(Path("/tmp")),
        fcdp.Threshold(0.8),
        fcdp.Budget(host=3),
        fcdp.Auto(),
    ):
        assert pickle.loads(pickle.dumps(policy)) == policy


def test_below_the_threshold_the_device_takes_a_unit_at_it_the_host() -> None:
    unit: Any = StandInUnit("unit", 10)
    placement = place(fcdp.Threshold(0.5), [unit])
    assert placement.preferences[unit] == ("device", "host")
    assert placement.admits(unit, usage(49))
    assert not placement.admits(unit, usage(50))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=10),
    device=st.integers(0, 60),
    host=st.integers(0, 60),
    disk=st.integers(0, 60),
)
def test_a_budget_is_kept_and_given_to_the_best_uses_first(
    sizes: list[tuple[int, int]], device: int, host: int, disk: int
) -> None:
    units: Any = [StandInUnit(str(i), size, reuses) for i, (size, reuses) in enumerate(sizes)]
    policy = fcdp.Budget(device=device, host=host, disk=disk, directory=Path("/tmp"))
    preferences = place(policy, units).preferences
    for tier, budget in (("device", device), ("host", host), ("disk", disk)):
        taken = [unit for unit in units if preferences[unit][:1] == (tier,)]
        assert sum(unit.shard_bytes for unit in taken) <= budget
        assert all(unit.reuses for unit in taken)
        # What is in no tier fits in none.
        left = budget - sum(unit.shard_bytes for unit in taken)
        assert all(
            unit.shard_bytes > left for unit in units if unit.reuses and not preferences[unit]
        )


def test_of_equal_units_the_last_ones_are_nearest() -> None:
    units: Any = [StandInUnit(name, 10) for name in "abcd"]
    preferences = place(fcdp.Budget(device=10, host=20), units).preferences
    assert [preferences[unit] for unit in units] == [(), ("host",), ("host",), ("device", "host")]


def test_frozen_units_come_before_trainable_ones() -> None:
    frozen, trained, kept = (
        StandInUnit("frozen", 10, 2),
        StandInUnit("trained", 10, 1),
        StandInUnit("kept", 10, 0),
    )
    preferences = place(fcdp.Budget(host=20), [frozen, trained, kept]).preferences
    assert preferences[frozen] == preferences[trained] == ("host",)  # type: ignore[index]
    assert preferences[kept] == ()  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fcdp.Threshold(1.1), "tau = 1.1"),
        (lambda: fcdp.Budget(host=-1), "host = -1"),
        (lambda: fcdp.Budget(disk=1), "needs a directory"),
        (lambda: fcdp.Auto(reserve=1.0), "reserve = 1.0"),
    ],
)
def test_bad_values_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_auto_measures_fills_the_headroom_and_backs_off() -> None:
    units: Any = [StandInUnit(name, 10) for name in "abcd"]
    placement = place(fcdp.Auto(reserve=0.1, measured_gathers=2), units)
    for _ in range(2):
        assert not any(placement.admits(unit, usage(65)) for unit in units)
    # 90 may be used, 65 were: two of ten each fit, the last of the forward pass.
    assert [placement.admits(unit, usage(65)) for unit in units] == [False, False, True, True]
    # Somebody else took memory: the unit at hand leaves, and does not come back.
    assert not placement.admits(units[3], usage(95))
    assert [placement.admits(unit, usage(65)) for unit in units] == [False, False, True, False]
