"""Micro-batches that take turns on one device: their gradients, activations and mistakes."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from baselines.cyclic.interleaved import Interleaved, SavedBytes
from baselines.settings import CyclicSettings
from tests.baselines.cyclic.training import WIDTH, Block, batch, made
from tests.baselines.jobs import job
from tests.fcdp.training import topology_of
from tests.ranks import Pools, on_ranks

ROWS = 3


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


@pytest.mark.parametrize("count", [2, 4])
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
def test_a_mistake_in_forward_is_raised_and_nothing_is_left_waiting() -> None:
    trainable = Interleaved(*made(1, 1, CyclicSettings(), k=3))
    trainable.step([batch(number, 0) for number in range(3)])
    lanes = [flight.lane for flight in trainable._flights]
    assert lanes
    with pytest.raises(IndexError):
        trainable.step([batch(0, 1), torch.full((2, 5), 10**6), batch(2, 1)])
    assert not any(lane._thread.is_alive() for lane in lanes)
