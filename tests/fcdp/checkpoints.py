"""A training run that tests of checkpoints save and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fcdp
from tests.fcdp import training
from tests.fcdp.training import Settings

PLAIN = Settings(2, 1)


class Run(training.Run):
    """A training that knows its step."""

    def __init__(self, settings: Settings = PLAIN, seed: int = 0) -> None:
        """With other parameters than those of seed 0, if one is given."""
        super().__init__(settings)
        if seed:
            torch.manual_seed(seed)
            with torch.no_grad():
                for param in self.model.parameters():
                    param.to_local().normal_()  # type: ignore[attr-defined]
        self.position = 0

    def train(self, steps: int) -> list[float]:
        self.position += steps
        return [self.step() for _ in range(steps)]

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
