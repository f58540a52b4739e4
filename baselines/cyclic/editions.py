"""Two versions of a stage's parameters in one process, for micro-batches a step apart.

A version may be written while graphs of the one before are alive: each has tensors of its own. Two
are enough: when a stage is updated, nothing needs the version before the one that it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

from baselines.strategy import Job, optimizer_of


class Editions:
    """Versions of one stage's trained parameters, by their number; the optimizer of them."""

    def __init__(self, model: nn.Module, params: Sequence[nn.Parameter], job: Job) -> None:
        self._params = (list(params), [nn.Parameter(param.detach().clone()) for param in params])
        number = {id(param): index for index, param in enumerate(params)}
        self._places = [
            (module, name, number[id(param)])
            for module in model.modules()
            for name, param in module._parameters.items()
            if id(param) in number
        ]
        self._optimizer = optimizer_of([*self._params[0], *self._params[1]], job)
        # A parameter has one state, whichever tensor it is in.
        for pair in zip(*self._params, strict=True):
            state: dict[str, torch.Tensor] = {}
            for param in pair:
                self._optimizer.state[param] = state

    def of(self, version: int) -> list[nn.Parameter]:
        """The parameters of a version: the newest, or the one before."""
        return self._params[version % 2]

    def values(self, version: int) -> list[torch.Tensor]:
        """The live elements of a version's parameters."""
        return [param.detach() for param in self.of(version)]

    def install(self, version: int) -> None:
        """Have the model compute with this version."""
        params = self.of(version)
        for module, name, index in self._places:
            module._parameters[name] = params[index]

    @torch.no_grad()
    def update(self, version: int, gradients: Sequence[torch.Tensor]) -> None:
        """Make the version after this one, by gradients."""
        torch._foreach_copy_(self.values(version + 1), self.values(version))
        for param, grad in zip(self.of(version + 1), gradients, strict=True):
            param.grad = grad
        self._optimizer.step()
        self._optimizer.zero_grad()
