"""Settings of workers that train apart, their outer rule, and how a late mean moves them."""

import pytest
import torch
from pydantic import ValidationError

from baselines import registry
from baselines.co2.train import Rule


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


def _late(rule: Rule, rounds: int, gap: float = 1.0) -> list[float]:
    """The starts of rounds that all end at 0, where each displacement comes a round late."""
    start, momentum = torch.ones(1), torch.zeros(1)
    sent, starts = [start.clone()], [1.0]
    for _ in range(rounds):
        arrived = sent.pop(0)
        sent.append(start.clone())
        rule.move(start, rule.absorb(momentum, arrived, torch.tensor(gap), 0.1), 0.1)
        starts.append(start.item())
    return starts


def test_what_a_round_solves_oscillates_when_it_is_late_unless_a_gap_damps_it() -> None:
    assert _late(Rule(12), 12)[:7] == [1, 0, -1, -1, 0, 1, 1]
    assert _late(Rule(12), 12)[6:] == _late(Rule(12), 6)
    assert max(map(abs, _late(Rule(12), 24, gap=1.5)[-6:])) < 0.05
    assert max(map(abs, _late(Rule(12, momentum=0.2), 24)[-6:])) > 5


def test_the_gap_counts_steps_or_rounds_of_them() -> None:
    moved, first = torch.tensor(6.0), torch.tensor([0.5, 0.0])  # the second: no step at all
    for penalty, gaps in {"none": [1, 1], "first-step": [13, 1], "first-steps": [4, 1]}.items():
        assert Rule(4, penalty=penalty).staleness(moved, first).expand(2).tolist() == gaps
