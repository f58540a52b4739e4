"""A training run that tests of checkpoints save and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import fcdp
from tests.fcdp.training import (
    Settings,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    shard_with_fcdp,
    topology_of,
)

PLAIN = Settings(2, 1)


class Run:
    """A training run on this rank."""

    def __init__(self, settings: Settings = PLAIN, seed: int = 0) -> None:
        self.topology = topology_of(settings.nodes, settings.ranks_per_node)
        model = make_model(settings)
        torch.manual_seed(seed)
        for param in model.parameters():
            if seed:
                nn.init.normal_(param)
        self.model = shard_with_fcdp(model, self.topology, settings)
        self.optimizer = make_optimizer(self.model, settings)
        self.data = batches(settings, self.topology.rank)
        self.position = 0

    def train(self, steps: int) -> list[float]:
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        loss = loss_of(self.model, next(self.data))
        self.position += 1
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, directory: Path, **options: Any) -> Any:
        extra = {"position": self.position}
        return fcdp.save(self.model, self.optimizer, directory, extra=extra, **options)

    def load(self, directory: Path) -> None:
        extra = fcdp.load(self.model, self.optimizer, directory)
        while self.position < extra["position"]:
            next(self.data)
            self.position += 1

    def params(self) -> dict[str, torch.Tensor]:
        return {
            name: param.full_tensor().detach().clone()
            for name, param in self.model.named_parameters()
        }


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def moments(run: Run) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}": value.full_tensor() if key != "step" else value
        for name, param in run.model.named_parameters()
        for key, value in run.optimizer.state[param].items()
    }


def errors_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        call(*args, **options)
    return f"{type(error.value).__name__}: {error.value}"
