"""The list of strategies: the settings and the schedule of each."""

from dataclasses import replace
from unittest import mock

import pytest

from baselines import registry
from baselines.description import Strategy
from baselines.registry import STRATEGIES, schedule_of
from baselines.settings import CacheSettings


def test_names_are_given_once_and_others_are_refused_with_what_there_is() -> None:
    assert len(set(registry.STRATEGY_NAMES)) == len(registry.STRATEGIES)
    with pytest.raises(ValueError, match="strategy = 'zero4': allowed are deepspeed-zero3, "):
        registry.find("zero4")


def test_a_strategy_takes_of_what_is_given_what_it_has() -> None:
    given = {"policy": "disk", "gather_codec": "int8", "deepspeed": "paper"}
    assert dict(registry.find("fsdp2").chosen(given)) == {"forwards": "gathered"}
    assert dict(registry.find("deepspeed-hpz").chosen(given)) == {"deepspeed": "paper"}
    assert registry.find("fcdp").chosen(given) == CacheSettings(policy="disk", gather_codec="int8")


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
