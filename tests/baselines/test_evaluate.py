"""The loss on data that are not trained on, by the strategies that cells use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.baselines.training import Settings, made
from tests.ranks import Pools

NODES = 2
SETTINGS = Settings("gpt2", "lora", nodes=NODES)


def evaluated(strategy: str, settings: Settings) -> tuple[float, list[float]]:
    """The loss of one sequence after a step, and the losses of the steps around it."""
    trainable, batches = made(strategy, settings)
    held_out = torch.arange(33).view(1, 33)
    losses = [trainable.step([next(batches)]).item()]
    found = trainable.evaluate(held_out)
    assert not found.requires_grad
    losses.append(trainable.step([next(batches)]).item())
    return found.item(), losses


def trained(strategy: str, settings: Settings) -> list[float]:
    trainable, batches = made(strategy, settings)
    return [trainable.step([next(batches)]).item() for _ in range(2)]


@pytest.mark.parametrize(
    ("strategy", "dtype", "apart"),
    [
        ("fcdp", torch.float32, 1e-6),
        ("fcdp-sched", torch.float32, 1e-6),
        ("zero3", torch.float32, 1e-6),
        ("mics", torch.float32, 1e-6),
        ("fsdp2-hsdp", torch.float32, 1e-6),
        ("ddp", torch.float32, 1e-6),
        ("replicated", torch.float32, 1e-6),
        ("fcdp", torch.bfloat16, 1e-6),
        ("replicated", torch.bfloat16, 1e-2),
    ],
)
def test_every_strategy_evaluates_like_fsdp2_and_trains_on_as_without(
    ranks: Pools, strategy: str, dtype: torch.dtype, apart: float
) -> None:
    settings = replace(SETTINGS, dtype=dtype)
    wanted = ranks.run(NODES, evaluated, "fsdp2", settings)
    found = ranks.run(NODES, evaluated, strategy, settings)
    assert len({loss for loss, _ in found}) == 1, "the ranks do not agree"
    assert found[0][0] == pytest.approx(wanted[0][0], rel=apart)
    without = ranks.run(NODES, trained, strategy, settings)
    assert [losses for _, losses in found] == without
