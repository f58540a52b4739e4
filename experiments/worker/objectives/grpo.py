"""Group relative policy optimization: answers are sampled, rewarded, and learnt from in a step."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn as nn

from experiments.records import objective as specs
from experiments.records.cell import Cell
from experiments.worker import models
from experiments.worker.objectives.objective import Ended, Reference, log_probabilities
from experiments.worker.objectives.rollout import Rollout, Sampler

#: Rewards of sequences by prompts, answers, and a mask of what counts: (sequences, tokens) each.
Reward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _digits(prompts: torch.Tensor, answers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return _share((answers >= ord("0")) & (answers <= ord("9")), counts)


def _copy(prompts: torch.Tensor, answers: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    turns = torch.arange(answers.shape[1], device=answers.device) % prompts.shape[1]
    return _share(answers == prompts[:, turns], counts)


def _share(right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (right & counts).sum(1) / counts.sum(1)


_REWARDS: Mapping[str, Reward] = {"digits": _digits, "copy": _copy}


class GRPO:
    """Policy optimization with groups of answers to one prompt, rewarded relative to the group."""

    def __init__(
        self, spec: specs.GRPO, cell: Cell, reference: Reference | None, rank: int
    ) -> None:
        self.epochs = spec.epochs
        self.rewards: list[float] = []
        self._spec = spec
        self._reference = reference
        self._micro_batch = cell.micro_batch
        self._prompt = cell.sequence_length + 1 - spec.new_tokens
        self._where = cell.origin.key("objective", "reward")
        self._reward = _REWARDS.get(spec.reward) or models.find_function(spec.reward, self._where)
        self._sampler = Sampler(cell, rank)
        self._rollout = Rollout(cell, rank) if spec.rollout != "trainer" else None
        #: Figures of each iteration's publication, by field of a measurement.
        self.publications: list[dict[str, float]] = []

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """Sampled answers with advantages, and their old and reference log-probabilities."""
        group = self._spec.group
        prompts = torch.cat([batch[::group].repeat_interleave(group, 0) for batch in batches])
        tokens, old = self._answers(model, prompts[:, : self._prompt], ended)
        answers = tokens[:, self._prompt :]
        counts = torch.ones_like(answers, dtype=torch.bool)
        if self._spec.end_token is not None:  # up to and with an answer's end
            ends = answers == self._spec.end_token
            counts = ends.cumsum(1) - ends.long() == 0
        advantages = self._advantages(tokens, counts)
        prepared = []
        for part in torch.arange(len(tokens), device=tokens.device).split(self._micro_batch):
            reference = old[part]
            if self._reference is not None:
                per_token = self._reference.log_probabilities(tokens[part])
                reference = per_token[:, self._prompt - 1 :]
            # Exact: float32 has all whole numbers up to 2^24.
            columns = (tokens[part], advantages[part, None], counts[part], old[part], reference)
            prepared.append(torch.cat([each.float() for each in columns], dim=1))
        ended("scoring")
        return prepared

    def _answers(
        self, model: nn.Module, prompts: torch.Tensor, ended: Ended
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts with their answers, and the answers' log-probabilities as they were drawn."""
        if self._rollout is None:
            tokens = self._sampler.generate(model, prompts)
            ended("generation")
            return tokens, self._sampler.scores(model, tokens)
        published = self._rollout.publish(model)
        ended("sync")
        answers = self._rollout.answers(prompts)
        ended("generation")
        self.publications.append(
            {
                "versions_behind": published.version - answers.version,
                "changed_share": published.changed / published.words,
                "bits_per_parameter": published.bits_per_parameter,
            }
        )
        return answers.tokens, answers.old

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        new, clip = self._spec.new_tokens, self._spec.clip
        tokens, advantages, counts, old, reference = batch.split(
            [self._prompt + new, 1, new, new, new], dim=1
        )
        current = log_probabilities(model, tokens.long())[:, self._prompt - 1 :]
        ratio = (current - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        behind = reference - current
        losses = self._spec.beta * (behind.exp() - behind - 1) - gain
        mean: torch.Tensor = ((losses * counts).sum(1) / counts.sum(1)).mean()
        return mean

    def _advantages(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Rewards less their group's mean, in its standard deviations; 0 where all are alike.

        Raises ``ValueError`` for a user's reward that is not one finite number per answer.
        """
        prompts, answers = tokens[:, : self._prompt], tokens[:, self._prompt :]
        rewards = self._reward(prompts, answers, counts)
        shape = getattr(rewards, "shape", None)
        if shape != (len(tokens),) or not rewards.isfinite().all():
            raise ValueError(
                f"{self._where}: {self._spec.reward} returned "
                f"{f'a {type(rewards).__name__}' if shape is None else tuple(shape)} for "
                f"{len(tokens)} answers; it must return a tensor with a finite number for each"
            )
        self.rewards.append(rewards.float().mean().item())
        groups = rewards.float().view(-1, self._spec.group)
        apart = groups - groups.mean(1, keepdim=True)
        return (apart / (groups.std(1, keepdim=True) + 1e-4)).flatten()
