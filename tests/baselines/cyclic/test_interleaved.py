"""Micro-batches that take turns on one device train as ranks do, and keep as much in each slot."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from baselines.cyclic.interleaved import Interleaved, SavedBytes
from baselines.optimizers import AnyOptimizer
from baselines.settings import CyclicSettings, UpdateRule
from baselines.strategy import load
from tests.baselines.cyclic.training import (
    ADAMW,
    PLAIN,
    WIDTH,
    Block,
    alike,
    batch,
    interleaved,
    made,
    trained,
)
from tests.baselines.jobs import job
from tests.fcdp.training import topology_of
from tests.ranks import Pools, on_ranks

pytestmark = pytest.mark.ranks

STEPS, ROWS = 5, 3


@pytest.mark.parametrize("rule", ["v1", "v2"])
@pytest.mark.parametrize(("count", "stages"), [(3, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize("optimizer", [ADAMW, PLAIN], ids=["adamw", "sgd"])
def test_each_micro_batch_computes_with_what_a_rank_would(
    ranks: Pools, rule: UpdateRule, count: int, stages: int, optimizer: AnyOptimizer
) -> None:
    arguments = (CyclicSettings(rule=rule, stages=stages), STEPS, count == 3, (0, 2, 3))
    expected = ranks.run(count, trained, "cyclic", count, *arguments, 1, optimizer)
    (actual,) = ranks.run(1, interleaved, count, *arguments, optimizer)
    for number, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        for step in range(STEPS):
            alike(mine.used[step], other.used[step], f"micro-batch {number}, step {step}:")
    assert actual[0].held_out == pytest.approx(expected[0].held_out, rel=1e-5)


def test_ranks_add_up_gradients_of_each_stage(ranks: Pools) -> None:
    """Two ranks whose micro-batches are alike train as one."""
    (alone,) = ranks.run(1, _losses, 1)
    assert ranks.run(2, _losses, 2) == [pytest.approx(alone, rel=1e-6)] * 2


def _losses(ranks: int) -> list[float]:
    trainable = Interleaved(*made(ranks, 1, CyclicSettings(), k=3))
    losses = [
        trainable.step([batch(number, step) for number in range(3)]).item() for step in range(4)
    ]
    return [*losses, trainable.evaluate(batch(99, 0)).item()]


@pytest.mark.parametrize("count", [2, 3, 4])
@on_ranks(1)
def test_activations_are_constant_and_about_half_of_all_at_once(count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    options = {"accumulation": count, "settings": CyclicSettings(), "loss": _homogeneous}
    # Before the strategy registers its hooks.
    saved = SavedBytes(model.parameters())
    with saved.counted():
        graphs = [_homogeneous(model, torch.rand(ROWS, WIDTH)) for _ in range(count)]
    at_once = saved.now
    for graph in graphs:
        graph.backward()
    del graphs, graph
    assert saved.now == 0
    model.zero_grad()
    trainable = Interleaved(model, job(topology_of(1, 1), model, **options))
    for _ in range(3):
        trainable.step([torch.rand(ROWS, WIDTH) for _ in range(count)])
    metrics: Any = trainable.take_metrics()
    trainable.settle()
    assert trainable._saved.now == 0
    # A block keeps its input and what its second matrix multiplies.
    unit = 3 * WIDTH * ROWS * 4
    assert metrics["activation_bytes_together"] == at_once == count**2 * unit
    assert metrics["activation_bytes_by_slot"] == [count * (count + 1) / 2 * unit] * (2 * count)


def _homogeneous(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).mean()


@on_ranks(1)
def test_more_stages_than_micro_batches_are_refused() -> None:
    expected = r"stages = 3: allowed are 1 to 2, as there are 2 micro-batches per step \(accum"
    with pytest.raises(ValueError, match=expected):
        load("cyclic-interleaved")(*made(1, 1, CyclicSettings(stages=3), k=2))


@on_ranks(1)
def test_a_mistake_in_forward_is_raised_and_nothing_is_left_waiting() -> None:
    trainable = Interleaved(*made(1, 1, CyclicSettings(), k=3))
    trainable.step([batch(number, 0) for number in range(3)])
    lanes = [flight.lane for flight in trainable._flights]
    assert lanes
    with pytest.raises(IndexError):
        trainable.step([batch(0, 1), torch.full((2, 5), 10**6), batch(2, 1)])
    assert not any(lane._thread.is_alive() for lane in lanes)
