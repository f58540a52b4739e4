"""Distillation: the divergence from a frozen teacher's next-token distribution."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from experiments.records import objective as specs
from experiments.records.cell import Cell
from experiments.worker import models
from experiments.worker.objectives.objective import Ended, Frozen, Shard, logits


class Distillation:
    """Distillation from a frozen teacher, whose logits travel with their tokens."""

    epochs = 1
    rewards: Sequence[float] = ()

    def __init__(
        self, spec: specs.Distillation, cell: Cell, model: nn.Module, shard: Shard
    ) -> None:
        """Raises ``ValueError`` for a teacher of another vocabulary."""
        # Another seed: a teacher of the model's shape would else have its random weights.
        update = {"model": spec.teacher, "tuning": "full", "seed": (cell.seed + 1) % 2**32}
        teacher, its_blocks = models.build(cell.model_copy(update=update))
        theirs, own = models.vocabulary(teacher), models.vocabulary(model)
        if theirs != own:
            raise ValueError(
                f"{cell.origin.key('objective', 'teacher')}: {spec.teacher.name} has a vocabulary "
                f"of {theirs} tokens, and {cell.model.name} of {own}; they must have the same"
            )
        self._teacher = Frozen(teacher, its_blocks, shard)
        self._temperature = spec.temperature

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """Tokens, and behind each the teacher's logits of the next."""
        prepared = []
        for batch in batches:
            tokens = batch[:, :-1]
            scores = self._teacher.apply(logits, tokens)
            prepared.append(torch.cat([tokens[..., None].float(), scores], dim=-1))
        ended("scoring")
        return prepared

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The divergence per token; its gradients are as large at every temperature."""
        student, teacher = (
            (scores / self._temperature).log_softmax(-1).flatten(0, 1)
            for scores in (logits(model, batch[..., 0].long()), batch[..., 1:])
        )
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return divergence * self._temperature**2
