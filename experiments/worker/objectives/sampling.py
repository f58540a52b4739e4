"""Answers to prompts, and how likely they were."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.objective import GRPO
from experiments.worker.objectives.objective import log_probabilities


class Sampler:
    """One rank's random numbers, with which it draws answers wherever that is."""

    def __init__(self, cell: Cell, rank: int) -> None:
        spec = cell.objective
        assert isinstance(spec, GRPO)
        self._spec = spec
        self._prompt = cell.sequence_length + 1 - spec.new_tokens
        self._micro_batch = cell.micro_batch
        self._seed = cell.seed * 100_003 + rank
        self._generator: torch.Generator | None = None

    def generate(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Prompts and answers: always as many tokens, so that no rank waits for another's."""
        if self._generator is None:
            self._generator = torch.Generator(tokens.device).manual_seed(self._seed)
        given, past = tokens, None
        for _ in range(self._spec.new_tokens):
            found: Any = model(input_ids=given, past_key_values=past, use_cache=True)
            past = found.past_key_values
            if past is None:
                raise ValueError(
                    "objective = grpo: the model keeps no keys and values of earlier tokens "
                    "(past_key_values), without which nothing is generated"
                )
            chances = (found.logits[:, -1].float() / self._spec.temperature).softmax(-1)
            given = torch.multinomial(chances, 1, generator=self._generator)
            tokens = torch.cat([tokens, given], dim=1)
        return tokens

    def scores(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of each token of the answers, a micro-batch at a time."""
        parts = [log_probabilities(model, part) for part in tokens.split(self._micro_batch)]
        return torch.cat(parts)[:, self._prompt - 1 :]
