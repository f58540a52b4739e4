"""Objectives: what a step computes before it updates, the same for all strategies.

A step is an iteration: without gradients an objective prepares micro-batches (it generates, and
scores with a frozen model), on which the strategy then steps as on any others, ``epochs`` times.
DPO and distillation are below; GRPO, which generates, and a user's own have their files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from baselines.strategy import Trainable
from experiments.records import objective as specs
from experiments.records.cell import Cell
from experiments.worker import configured, models
from experiments.worker.objectives import grpo, own
from experiments.worker.objectives.objective import (
    Ended,
    Frozen,
    Objective,
    Reference,
    Shard,
    log_probabilities,
    logits,
)


def of(
    cell: Cell, model: nn.Module, blocks: Sequence[nn.Module], rank: int, shard: Shard
) -> Objective | None:
    """The cell's objective on this rank; ``None`` where a step is a loss and no more.

    The model is not sharded yet; ``shard`` puts what is frozen beside it under its strategy.
    """
    match spec := cell.objective:
        case specs.CausalLM():
            return None
        case specs.DPO():
            return DPO(spec, Reference(cell, model, blocks, shard))
        case specs.GRPO():
            reference = Reference(cell, model, blocks, shard) if spec.beta else None
            return grpo.GRPO(spec, cell, reference, rank)
        case specs.Distillation():
            return Distillation(spec, _teacher(spec, cell, model, shard))
        case specs.OwnObjective():
            return own.make(spec, cell)


def iterate(
    objective: Objective, trainable: Trainable, batches: Sequence[torch.Tensor], ended: Ended
) -> torch.Tensor:
    """Prepare the micro-batches and step on them; returns this rank's mean loss.

    ``ended`` is called with the name of each phase at its end.
    """
    model = trainable.model
    model.eval()
    with torch.no_grad(), trainable.without_gradients(), trainable.casting():
        prepared = objective.prepare(model, batches, ended)
    model.train()
    losses = [trainable.step(prepared) for _ in range(objective.epochs)]
    ended("update")
    return torch.stack(losses).mean()


class DPO:
    """Prefers the second halves of sequences to themselves read backwards."""

    epochs = 1
    rewards: Sequence[float] = ()

    def __init__(self, spec: specs.DPO, reference: Reference) -> None:
        self._beta = spec.beta
        self._reference = reference

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """Pairs, the preferred ones first, each with its answer's reference log-probability."""
        prepared = []
        for batch in batches:
            prompt, answer = batch.split([_half(batch), batch.shape[1] - _half(batch)], dim=1)
            pairs = torch.cat([batch, torch.cat([prompt, answer.flip(1)], dim=1)])
            reference = _of_answers(self._reference.log_probabilities(model, pairs))
            # Exact: float32 has all whole numbers up to 2^24.
            prepared.append(torch.cat([pairs.float(), reference[:, None]], dim=1))
        ended("scoring")
        return prepared

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


def _teacher(spec: specs.Distillation, cell: Cell, model: nn.Module, shard: Shard) -> Frozen:
    """The teacher, sharded; ``ValueError`` for one of another vocabulary."""
    # Another seed: random weights would be the model's own, if its shape is.
    update = {"model": spec.teacher, "tuning": "full", "seed": (cell.seed + 1) % 2**32}
    teacher, its_blocks = models.build(cell.model_copy(update=update))
    theirs, own = configured.vocabulary(teacher), configured.vocabulary(model)
    if theirs != own:
        raise ValueError(
            f"{cell.origin.key('objective', 'teacher')}: {spec.teacher.name} has a vocabulary of "
            f"{theirs} tokens, and {cell.model.name} of {own}; they must have the same"
        )
    return Frozen(teacher, its_blocks, shard)


class Distillation:
    """Has the teacher's logits travel with the tokens that they are of."""

    epochs = 1
    rewards: Sequence[float] = ()

    def __init__(self, spec: specs.Distillation, teacher: Frozen) -> None:
        self._teacher = teacher
        self._temperature = spec.temperature

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """Tokens, and behind each the teacher's logits after it."""
        prepared = []
        for batch in batches:
            tokens = batch[:, :-1]
            found = self._teacher.logits(tokens)
            prepared.append(torch.cat([tokens[..., None].float(), found], dim=-1))
        ended("scoring")
        return prepared

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The divergence per token; its gradients are as large at every temperature."""
        student, teacher = (
            (found / self._temperature).log_softmax(-1).flatten(0, 1)
            for found in (logits(model, batch[..., 0].long()), batch[..., 1:])
        )
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return divergence * self._temperature**2
