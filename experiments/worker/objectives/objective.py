"""The form of an objective, and what several of them compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn as nn

from experiments.records.cell import Cell

#: Parts of an iteration: answers are generated, what is prepared is scored, and stepped on.
Phase = Literal["generation", "scoring", "update"]
#: Told the name of a phase when it has ended.
Ended = Callable[[Phase], None]


class Objective(Protocol):
    """What a step computes, on one rank.

    All ranks call the model equally often: each call is a collective.
    """

    #: Optimizer steps on what has been prepared.
    epochs: int
    #: The mean reward of each iteration so far; empty without rewards.
    rewards: Sequence[float]

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """What to step on, a tensor per micro-batch of int64 (sequences, tokens + 1).

        Called without gradients.
        """
        ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss of what was prepared, a scalar; calls the model once."""
        ...


@dataclass(frozen=True)
class Made:
    """An objective, the model to put under a strategy for it, and that model's blocks."""

    objective: Objective
    model: nn.Module
    blocks: Sequence[nn.Module]


class Beside(nn.Module):
    """A policy with a frozen model beside it, so that a strategy shards both."""

    def __init__(self, policy: nn.Module, frozen: nn.Module) -> None:
        super().__init__()
        self.policy = policy
        self.frozen = frozen.requires_grad_(False)

    def forward(self, *, frozen: bool = False, **inputs: Any) -> Any:
        return (self.frozen if frozen else self.policy)(**inputs)


class Reference:
    """The model as it was: itself with its adapters off, or a frozen copy beside it."""

    def __init__(self, cell: Cell, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._adapted: Any = model if cell.tuning == "lora" else None
        self.model, self.blocks = model, blocks
        if self._adapted is None:
            places = {module: name for name, module in model.named_modules()}
            frozen = copy.deepcopy(model)
            self.model, self.blocks = beside(
                model, blocks, frozen, [frozen.get_submodule(places[each]) for each in blocks]
            )

    def log_probabilities(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """As of ``log_probabilities``, of the reference."""
        if self._adapted is None:
            return log_probabilities(model, tokens, frozen=True)
        with self._adapted.disable_adapter():
            return log_probabilities(model, tokens)


def beside(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    frozen: nn.Module,
    frozen_blocks: Sequence[nn.Module],
) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Both in one module, and its blocks: what is frozen is gathered when it is called alone."""
    return Beside(model, frozen), [*blocks, *frozen_blocks, frozen]


def logits(model: nn.Module, tokens: torch.Tensor, **which: bool) -> torch.Tensor:
    """Float32 logits of a ``transformers`` model: (sequences, tokens, vocabulary)."""
    found: torch.Tensor = model(input_ids=tokens, use_cache=False, **which).logits
    return found.float()


def log_probabilities(model: nn.Module, tokens: torch.Tensor, **which: bool) -> torch.Tensor:
    """Of each token but the first after those before it: (sequences, tokens)."""
    found = logits(model, tokens[:, :-1], **which).log_softmax(-1)
    return found.gather(-1, tokens[:, 1:, None]).squeeze(-1)
