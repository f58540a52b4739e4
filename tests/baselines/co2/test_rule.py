"""Settings of workers that train apart: what is allowed, and what a reader sees."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baselines import registry
from baselines.co2.train import Rule
from baselines.settings import CO2Settings, LocalSGDSettings, SlowMoSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("interval", 0),
        ("interval", 2.5),
        ("clip", 0.0),
        ("clip", -1.0),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("outer_learning_rate", 0.0),
        ("outer_learning_rate", float("inf")),
        ("penalty", "gap"),
        ("worker", "gpu"),
        ("outer_on", "disk"),
        ("nodes_per_worker", 0),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        registry.find("co2").chosen({name: value})


@pytest.mark.parametrize("together", [3, 8])
def test_workers_must_divide_the_nodes(together: int) -> None:
    given = {"worker": "nodes", "nodes_per_worker": together}
    with pytest.raises(ValidationError, match=r"nodes_per_worker\n.*allowed are 1, 2, 4"):
        registry.find("co2").chosen(given, nodes=4)
    assert registry.find("co2").chosen({**given, "nodes_per_worker": 2}, nodes=4)


def test_a_worker_of_several_nodes_is_of_nodes() -> None:
    with pytest.raises(ValidationError, match=r"nodes_per_worker\n.*allowed is 1 where worker is"):
        registry.find("co2").chosen({"nodes_per_worker": 2})


def test_each_kind_has_its_rule() -> None:
    assert Rule.of(LocalSGDSettings(interval=5)) == Rule(5)
    slowmo = Rule.of(SlowMoSettings(interval=5, outer_momentum=0.7))
    assert slowmo == Rule(5, momentum=0.7, by_learning_rate=True)
    co2 = Rule.of(CO2Settings(clip=None))
    assert co2 == Rule(12, momentum=0.2, penalty="first-steps")
