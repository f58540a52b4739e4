"""A stage's parameters on this rank, and the optimizer of a stage that it owns."""

from __future__ import annotations

import torch
import torch.nn as nn

from baselines.part import Part
from baselines.strategy import Job, optimizer_of


class Stage:
    """One stage: what stays from forward to backward, and what may be let go in between."""

    def __init__(self, kept: Part, passed: Part) -> None:
        self.kept = kept
        self.passed = passed

    @property
    def params(self) -> list[nn.Parameter]:
        return [*self.kept.params, *self.passed.params]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.requires_grad]

    def values(self) -> torch.Tensor:
        """A copy of all elements end to end."""
        return torch.cat((self.kept.values(), self.passed.values()))

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        kept, passed = values.split((self.kept.numel, self.passed.numel))
        self.kept.fill(kept)
        self.passed.fill(passed)


class Owned:
    """The newest parameters of the stage that this rank owns, and their optimizer."""

    def __init__(self, stage: Stage, job: Job) -> None:
        #: All elements end to end, as messages have them.
        self.newest = stage.values()
        self._passed_from = stage.kept.numel
        sizes = [param.numel() for param in stage.params]
        views = zip(stage.params, self.newest.split(sizes), strict=True)
        self._params = [
            nn.Parameter(view.view(param.shape)) for param, view in views if param.requires_grad
        ]
        self._optimizer = optimizer_of(self._params, job)

    @property
    def passed(self) -> torch.Tensor:
        """The elements of what is let go between forward and backward."""
        return self.newest[self._passed_from :]

    def update(self, gradients: torch.Tensor) -> None:
        """Step by the mean gradients of all ranks, end to end."""
        parts = gradients.split([param.numel() for param in self._params])
        for param, grad in zip(self._params, parts, strict=True):
            param.grad = grad.view(param.shape)
        self._optimizer.step()
        self._optimizer.zero_grad()
