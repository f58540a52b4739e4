"""Objectives whose micro-batches a frozen model scores first: preferences, and distillation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from experiments.records import objective as specs
from experiments.records.cell import Cell
from experiments.worker import configured, models
from experiments.worker.objectives.objective import (
    Ended,
    Frozen,
    Reference,
    Shard,
    log_probabilities,
    logits,
)


class _Scored(ABC):
    """Has scores travel with the tokens that they are of; each micro-batch is stepped on once."""

    epochs = 1
    rewards: Sequence[float] = ()

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        prepared = [self._scored(model, batch) for batch in batches]
        ended("scoring")
        return prepared

    @abstractmethod
    def _scored(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Tokens and scores in one tensor, of float32: it has all whole numbers up to 2^24."""


class DPO(_Scored):
    """Direct preference optimization: margins over the model as it was.

    Prefers the second halves of sequences to themselves read backwards.
    """

    def __init__(self, spec: specs.DPO, reference: Reference) -> None:
        self._beta = spec.beta
        self._reference = reference

    def _scored(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Pairs, the preferred ones first, each with its answer's reference log-probability."""
        prompt, answer = batch.split([_half(batch), batch.shape[1] - _half(batch)], dim=1)
        pairs = torch.cat([batch, torch.cat([prompt, answer.flip(1)], dim=1)])
        reference = _of_answers(self._reference.log_probabilities(model, pairs))
        return torch.cat([pairs.float(), reference[:, None]], dim=1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        tokens, reference = batch[:, :-1].long(), batch[:, -1]
        margins = _of_answers(log_probabilities(model, tokens)) - reference
        preferred, other = margins.chunk(2)
        return -F.logsigmoid(self._beta * (preferred - other)).mean()


def _half(tokens: torch.Tensor) -> int:
    return tokens.shape[1] // 2


def _of_answers(found: torch.Tensor) -> torch.Tensor:
    """Log-probability of each answer, of those (sequences, tokens) of all tokens but the first."""
    return found[:, (found.shape[1] + 1) // 2 - 1 :].sum(1)


class Distillation(_Scored):
    """The divergence from a frozen teacher's next-token distribution."""

    def __init__(
        self, spec: specs.Distillation, cell: Cell, model: nn.Module, shard: Shard
    ) -> None:
        """Raises ``ValueError`` for a teacher of another vocabulary."""
        # Another seed: random weights would be the model's own, if its shape is.
        update = {"model": spec.teacher, "tuning": "full", "seed": (cell.seed + 1) % 2**32}
        teacher, its_blocks = models.build(cell.model_copy(update=update))
        theirs, own = configured.vocabulary(teacher), configured.vocabulary(model)
        if theirs != own:
            raise ValueError(
                f"{cell.origin.key('objective', 'teacher')}: {spec.teacher.name} has a vocabulary "
                f"of {theirs} tokens, and {cell.model.name} of {own}; they must have the same"
            )
        self._teacher = Frozen(teacher, its_blocks, shard)
        self._temperature = spec.temperature

    def _scored(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Tokens, and behind each the teacher's logits after it."""
        tokens = batch[:, :-1]
        return torch.cat([tokens[..., None].float(), self._teacher.logits(tokens)], dim=-1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The divergence per token; its gradients are as large at every temperature."""
        student, teacher = (
            (found / self._temperature).log_softmax(-1).flatten(0, 1)
            for found in (logits(model, batch[..., 0].long()), batch[..., 1:])
        )
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return divergence * self._temperature**2
