"""The outer rule of workers that train apart, and how a late mean moves them."""

import torch

from baselines.co2.train import Rule


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
