"""Each strategy of the registry has its schedule, or is refused by name where it is asked for."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from baselines import registry
from baselines.description import Strategy
from baselines.registry import STRATEGIES, schedule_of
from baselines.schedule import FCDP

SCHEDULED = [strategy for strategy in STRATEGIES if strategy.schedule is not None]


@pytest.mark.parametrize("strategy", SCHEDULED, ids=lambda strategy: str(strategy.name))
def test_what_quantises_says_so(strategy: Strategy) -> None:
    schedule = schedule_of(strategy.name)
    quantises = bool(schedule.gather_codec or schedule.reduce_codec)
    assert quantises == (strategy.numerics == "bounded")


def test_a_strategy_without_a_schedule_is_not_simulated() -> None:
    added = replace(registry.find("fcdp"), name="added", schedule=None)
    with mock.patch.object(registry, "STRATEGIES", (*STRATEGIES, added)):
        assert "added" not in registry.simulated()
        with pytest.raises(ValueError, match="strategy = 'added': is not simulated yet"):
            schedule_of("added")


def test_an_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="strategy = 'zero4': allowed are deepspeed-zero3"):
        schedule_of("zero4")


def test_where_entries_are_kept() -> None:
    """What the strategy fixes goes before what the cell says."""
    assert FCDP.keeps_in("disk") == "disk"
    assert replace(FCDP, policy="device").keeps_in("disk") == "device"
    assert replace(FCDP, cache=None).keeps_in("disk") is None
