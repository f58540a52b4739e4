"""A model and a loss of a user's own; imported by ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from baselines.strategy import causal_loss


class Model(nn.Module):
    """Two blocks between an embedding and an output layer; returns logits as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.output = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.output(hidden)


def build(sequence_length: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    model = Model()
    return model, list(model.blocks)


def partly_narrow(sequence_length: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """A model that is frozen already, partly in types of its own, one of them of integers."""
    model = Model()
    model.requires_grad_(False)
    model.embedding.to(torch.bfloat16)
    codes = torch.zeros(3, dtype=torch.int8)
    model.register_parameter("codes", nn.Parameter(codes, requires_grad=False))
    return model, list(model.blocks)


def loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    logits = model(sequences[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def without_blocks(sequence_length: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    return Model(), []


def with_blocks_of_another(sequence_length: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    return Model(), list(Model().blocks)


def model_alone(sequence_length: int) -> Any:
    return Model()


def exits(sequence_length: int) -> Any:
    raise SystemExit


def float_loss(model: nn.Module, sequences: torch.Tensor) -> Any:
    return loss(model, sequences).item()


def vector_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    return loss(model, sequences).repeat(2)


def detached_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    return loss(model, sequences).detach()


class Objective:
    """Next tokens of the first half of each sequence."""

    epochs = 2
    rewards: Sequence[float] = ()

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Any
    ) -> Sequence[torch.Tensor]:
        ended("scoring")
        return [batch[:, : batch.shape[1] // 2] for batch in batches]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return causal_loss(model, batch)


def objective(sequence_length: int) -> Objective:
    return Objective()


class Unequal(Objective):
    """An objective whose rank 1 does something once more than rank 0, or once less."""

    def __init__(self, what: str) -> None:
        self.more = what if dist.get_rank() else ""

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Any
    ) -> Sequence[torch.Tensor]:
        for _ in range(2 if self.more == "scored" else 1):
            causal_loss(model, batches[0])
        prepared = super().prepare(model, batches, ended)
        if self.more == "told":
            ended("scoring")
        return [*prepared, prepared[0]] if self.more == "prepared" else prepared

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if self.more == "not learnt":
            return torch.zeros((), requires_grad=True)
        first = super().loss(model, batch)
        return super().loss(model, batch) if self.more == "learnt" else first


def lengths(prompts: torch.Tensor, answers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """A reward: how much of an answer counts."""
    return counts.sum(1).float()


def one_reward_for_all(*_: torch.Tensor) -> torch.Tensor:
    return torch.ones(1)


def not_a_number(prompts: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.full((len(prompts),), torch.nan)
