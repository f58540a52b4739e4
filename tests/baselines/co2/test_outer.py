"""The outer update's arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baselines.co2.train import OuterState, Rule

ROUNDS = st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), max_size=4)


def run(rule: Rule, rounds: list[list[float]], rate: float = 0.1) -> OuterState:
    state = OuterState(torch.zeros(3), torch.zeros(3))
    for mean in rounds:
        state.absorb(rule, torch.tensor(mean), torch.ones(()), rate)
        state.move(rule, rate)
    return state


@given(ROUNDS)
def test_without_momentum_the_start_follows_the_mean(rounds: list[list[float]]) -> None:
    expected = torch.zeros(3)
    for mean in rounds:
        expected = expected - torch.tensor(mean)
    assert run(Rule(5), rounds).start.equal(expected)


def _late(rule: Rule, rounds: int, gap: float = 1.0) -> list[float]:
    """Where rounds that end at 0 whatever they start from go on from, each one round late."""
    state = OuterState(torch.ones(1), torch.zeros(1))
    sent, starts = [state.start.clone()], [1.0]
    for _ in range(rounds):
        arrived = sent.pop(0)
        sent.append(state.start.clone())
        state.absorb(rule, arrived, torch.tensor(gap), 0.1)
        state.move(rule, 0.1)
        starts.append(state.start.item())
    return starts


def test_what_a_round_solves_oscillates_when_it_is_late_unless_a_gap_damps_it() -> None:
    assert _late(Rule(12), 12)[:7] == [1, 0, -1, -1, 0, 1, 1]
    assert _late(Rule(12), 12)[6:] == _late(Rule(12), 6)
    assert max(map(abs, _late(Rule(12), 24, gap=1.5)[-6:])) < 0.05
    assert max(map(abs, _late(Rule(12, momentum=0.2), 24)[-6:])) > 5


@given(ROUNDS)
def test_no_element_moves_further_than_the_clip_allows(rounds: list[list[float]]) -> None:
    rule = Rule(5, learning_rate=2.0, momentum=0.5, clip=0.25)
    state = OuterState(torch.zeros(3), torch.zeros(3))
    for mean in rounds:
        state.absorb(rule, torch.tensor(mean), torch.ones(()), 0.1)
        beyond = int((state.momentum.abs() > 0.25).sum())
        before = state.start.clone()
        squares, clipped = state.move(rule, 0.1)
        assert (state.start - before).abs().max() <= 0.5 + 1e-5
        assert clipped == beyond
        assert squares == pytest.approx((state.start - before).square().sum().item(), abs=1e-4)


def test_by_learning_rate_matters_for_clipping_alone() -> None:
    rounds = [[0.5, -0.25, 0.125], [1.0, 1.0, 1.0]]
    plain = run(Rule(5, momentum=0.5), rounds)
    scaled = run(Rule(5, momentum=0.5, by_learning_rate=True), rounds)
    torch.testing.assert_close(plain.start, scaled.start)
    torch.testing.assert_close(plain.momentum / 0.1, scaled.momentum)
    clipped = run(Rule(5, momentum=0.5, by_learning_rate=True, clip=1.0), rounds)
    assert clipped.start.abs().max() <= 0.2 + 1e-6


def test_the_gap_counts_steps_or_rounds_of_them() -> None:
    moved, first = torch.tensor(6.0), torch.tensor(0.5)
    assert Rule(4).staleness(moved, first) == 1
    assert Rule(4, penalty="first-step").staleness(moved, first) == 13
    assert Rule(4, penalty="first-steps").staleness(moved, first) == 4
    assert Rule(4, penalty="first-step").staleness(moved, torch.zeros(())) == 1  # no step at all
