"""Direct preference optimization: margins over the reference model."""

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F

from experiments.records import objective as specs
from experiments.worker.objectives.objective import Ended, Reference, log_probabilities


class DPO:
    """Preference of the second halves of sequences over the same tokens in reverse."""

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
            prompt, answer = batch.tensor_split([batch.shape[1] // 2], dim=1)
            pairs = torch.cat([batch, torch.cat([prompt, answer.flip(1)], dim=1)])
            reference = _of_answers(self._reference.log_probabilities(pairs))
            # Exact: float32 has all whole numbers up to 2^24.
            prepared.append(torch.cat([pairs.float(), reference[:, None]], dim=1))
        ended("scoring")
        return prepared

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        tokens, reference = batch[:, :-1].long(), batch[:, -1]
        margins = _of_answers(log_probabilities(model, tokens)) - reference
        preferred, rejected = margins.chunk(2)
        return -F.logsigmoid(self._beta * (preferred - rejected)).mean()


def _of_answers(per_token: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of answers, from those (sequences, tokens) of all tokens but the first."""
    return per_token[:, (per_token.shape[1] + 1) // 2 - 1 :].sum(1)
