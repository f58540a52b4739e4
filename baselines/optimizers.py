"""The optimizers that cells may train with, and how their learning rates change over the steps.

Strategies step whatever ``make`` gives them: the schedule hangs on the optimizer's own steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from baselines.settings import Strict

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

_BelowOne = Annotated[float, Field(ge=0, lt=1)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Count = Annotated[int, Field(ge=1)]


class Decay(Strict):
    """The learning rate is multiplied after each so many steps."""

    every: _Count
    by: _Share


class Cosine(Strict):
    """The learning rate grows to the cell's, and falls by half a cosine to nothing."""

    #: Steps over which it grows.
    warm_up: _Count
    #: The step at which nothing is left of it: all of a run's.
    end: _Count

    @model_validator(mode="after")
    def _falls(self) -> Cosine:
        if self.end <= self.warm_up:
            raise ValueError(f"end = {self.end}: allowed are those above warm_up = {self.warm_up}")
        return self

    def rate(self, step: int) -> float:
        """The learning rate's factor at a step, counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        share = min(1.0, (step - self.warm_up) / (self.end - self.warm_up))
        return (1 + math.cos(math.pi * share)) / 2


class _Optimizer(Strict):
    #: How much of a parameter is taken off per step, in units of the learning rate.
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class AdamW(_Optimizer):
    """AdamW, by default with PyTorch's own settings and a constant learning rate."""

    kind: Literal["adamw"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    #: How much of the second moment a step keeps.
    beta2: _BelowOne = 0.999
    #: Steps over which the rate grows to the cell's, to fall by the root of the steps after;
    #: ``None``: it is constant.
    inverse_sqrt_after: _Count | None = None
    #: The rate grows, then falls to nothing; in place of ``inverse_sqrt_after``.
    cosine: Cosine | None = None

    @model_validator(mode="after")
    def _has_one_schedule(self) -> AdamW:
        if self.cosine is not None and self.inverse_sqrt_after is not None:
            raise ValueError("cosine: allowed is it alone, without inverse_sqrt_after")
        return self

    @property
    def name(self) -> str:
        return "AdamW" if self == AdamW() else "AdamW of its own settings"

    @property
    def is_constant(self) -> bool:
        return self.inverse_sqrt_after is None and self.cosine is None

    def rate(self, step: int) -> float:
        """The learning rate's factor at a step, counted from 0."""
        if self.cosine is not None:
            return self.cosine.rate(step)
        if self.inverse_sqrt_after is None:
            return 1.0
        share = (step + 1) / self.inverse_sqrt_after
        return min(share, 1 / math.sqrt(share))


class SGD(_Optimizer):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"]
    momentum: _BelowOne = 0.9
    decay: Decay | None = None

    @property
    def name(self) -> str:
        return f"SGD, momentum {self.momentum:g}"

    @property
    def is_constant(self) -> bool:
        return self.decay is None

    def rate(self, step: int) -> float:
        """The learning rate's factor at a step, counted from 0."""
        return 1.0 if self.decay is None else self.decay.by ** (step // self.decay.every)


AnyOptimizer = AdamW | SGD


def make(
    chosen: AnyOptimizer,
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    learning_rate: float,
) -> torch.optim.Optimizer:
    """The optimizer of these parameters, whose learning rate follows its schedule by itself.

    Beside an accelerator a CPU steps offloaded parameters by PyTorch's vectorised loop. All that
    trains on CPUs alone steps by operators, as what trains on accelerators does.
    """
    import torch  # here: who reads matrices need not wait for it

    given: Any = [*params]  # what may be iterated over once
    tensors = [each for param in given for each in _tensors(param)]
    offloaded = torch.accelerator.is_available() and all(each.is_cpu for each in tensors)
    made: torch.optim.Optimizer
    common: dict[str, Any] = {
        "weight_decay": chosen.weight_decay,
        "foreach": not offloaded,
        "fused": offloaded,
    }
    if isinstance(chosen, SGD):
        made = torch.optim.SGD(given, learning_rate, chosen.momentum, **common)
    else:
        made = torch.optim.AdamW(given, learning_rate, (0.9, chosen.beta2), **common)

    def follow(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            # In the group, and so in checkpoints.
            done = group.get("steps_done", 0)
            group["lr"] = learning_rate * chosen.rate(done)
            group["steps_done"] = done + 1

    if not chosen.is_constant:
        made.register_step_pre_hook(follow)
    return made


def _tensors(param: nn.Parameter | dict[str, Any]) -> Iterable[torch.Tensor]:
    """A parameter, or those of a group as optimizers take it."""
    return param["params"] if isinstance(param, dict) else [param]
