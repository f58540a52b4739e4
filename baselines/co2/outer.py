"""The outer update: how a round's mean displacement moves what all workers start from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from baselines.settings import DiLoCoSettings, LocalSGDSettings, Penalty


@dataclass(frozen=True)
class Rule:
    """Rule by which a round's mean displacement moves the state that all workers start from.

    m ← β·m + Δ/(Λ·γ), x ← x − α·γ·clamp(m, ±φ), with γ = 1 unless ``by_learning_rate``
    (Algorithm 1); with ``nesterov`` x moves by Δ + β·m, as PyTorch's SGD has it. All of it is
    element-wise over flat fp32 tensors, or a scalar that all workers know alike: what a worker
    shards its parts shard too, and all stay equal to the last bit.
    """

    interval: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    by_learning_rate: bool = False
    clip: float | None = None
    penalty: Penalty = "none"

    @classmethod
    def of(cls, settings: LocalSGDSettings) -> Rule:
        """The rule of a strategy's settings; Local SGD goes on from the mean."""
        names = {field.name for field in fields(cls)}
        given = {name.removeprefix("outer_"): value for name, value in settings}
        own = {name: value for name, value in given.items() if name in names}
        return cls(**own, nesterov=isinstance(settings, DiLoCoSettings))

    def scale(self, rate: float) -> float:
        """γ, of local steps with the learning rate ``rate``."""
        return rate if self.by_learning_rate else 1.0

    def staleness(self, moved: torch.Tensor, first_step: torch.Tensor) -> torch.Tensor:
        """The gap Λ ≥ 1 that a displacement of one round ago is divided by, a scalar.

        ``moved`` is the norm of the outer update that the displacement knows nothing of,
        ``first_step`` that of the first local step of its round, the mean over workers. The paper's
        formula is not public; these bound a round by its first step, the largest while the learning
        rate falls: ``first-step`` counts the staleness in such steps, ``first-steps`` in rounds of
        ``interval`` of them.
        """
        if self.penalty == "none":
            return torch.ones_like(moved)
        steps = self.interval if self.penalty == "first-steps" else 1
        return 1 + torch.where(first_step > 0, moved / (steps * first_step), 0)


class OuterState:
    """State that all workers share after each round: their start, and the outer momentum."""

    def __init__(self, start: torch.Tensor, momentum: torch.Tensor) -> None:
        """Take two float32 tensors (elements), which become this state's own."""
        self.start = start
        self.momentum = momentum
        #: Displacement by which the start moves next.
        self._move = momentum

    def absorb(self, rule: Rule, mean: torch.Tensor, gap: torch.Tensor, rate: float) -> None:
        """Take a mean displacement (elements), which is overwritten, into the momentum.

        ``gap`` is its staleness, a scalar, and ``rate`` the local steps' learning rate. By
        Nesterov's rule ``mean`` stays in use until ``move``.
        """
        scale = rule.scale(rate)
        self.momentum.mul_(rule.momentum).add_(mean.div_(gap * scale))
        if rule.nesterov:
            self._move = mean.add_(self.momentum, alpha=rule.momentum)

    def move(self, rule: Rule, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the start by the momentum, or as Nesterov has it.

        Returns the sum of squares of what it moved by, and how many elements were clipped, scalars.
        """
        scale = rule.scale(rate)
        move = self._move
        clipped = torch.zeros((), device=move.device)
        if rule.clip is not None:
            clipped = (move.abs() > rule.clip).sum().float()
            move = move.clamp(-rule.clip, rule.clip)
        move = move * (rule.learning_rate * scale)
        self.start.sub_(move)
        return move.dot(move), clipped
