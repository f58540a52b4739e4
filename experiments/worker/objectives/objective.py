"""The protocol of objectives, what several compute, and the cost of their iterations."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

from baselines.strategy import Measure, Trainable
from experiments.records.cell import Cell

#: Parts of an iteration: a rollout takes the new weights, answers are generated, micro-batches are
#: scored, and then stepped on.
Phase = Literal["sync", "generation", "scoring", "update"]
#: A callback for the end of a phase, which takes its name.
Ended = Callable[[Phase], None]
#: A function that puts a model with these blocks under the cell's strategy.
Shard = Callable[[nn.Module, Sequence[nn.Module]], Trainable]
#: The method ``apply`` of the model that is trained, once there is one.
Apply = Callable[[Measure, torch.Tensor], torch.Tensor]


class Objective(Protocol):
    """Computation of a step, on one rank.

    All ranks call the model equally often: each call is a collective.
    """

    @property
    def epochs(self) -> int:
        """Optimizer steps on what has been prepared."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """The mean reward of each iteration so far; empty without rewards."""
        ...

    def prepare(
        self, model: nn.Module, batches: Sequence[torch.Tensor], ended: Ended
    ) -> Sequence[torch.Tensor]:
        """Micro-batches to step on, each a tensor of int64 (sequences, tokens + 1).

        Called without gradients.
        """
        ...

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """The mean loss of what was prepared, a scalar; calls the model once."""
        ...


class Frozen:
    """A model that the cell's strategy shards, and that nothing trains."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], shard: Shard) -> None:
        self._trainable = shard(model.requires_grad_(False).eval(), blocks)

    def apply(self, function: Measure, tokens: torch.Tensor) -> torch.Tensor:
        """Return what ``function`` makes of this model and of tokens, without gradients."""
        with torch.no_grad(), self._trainable.without_gradients(), self._trainable.casting():
            return self._trainable.apply(function, tokens)


class Reference:
    """The model before training: itself with adapters scaled to 0, or a frozen copy."""

    def __init__(
        self, cell: Cell, model: nn.Module, blocks: Sequence[nn.Module], shard: Shard, apply: Apply
    ) -> None:
        self._apply = apply
        self._copy: Frozen | None = None
        if cell.tuning == "full":
            places = {module: name for name, module in model.named_modules()}
            copied = copy.deepcopy(model)
            its_blocks = [copied.get_submodule(places[block]) for block in blocks]
            try:
                self._copy = Frozen(copied, its_blocks, shard)
            except ValueError as error:
                where = cell.origin.key("objective", "beta")
                raise ValueError(
                    f"{where}: the reference, a frozen copy of all that is trained: {error}"
                ) from error

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        """The function ``log_probabilities`` of the reference."""
        if self._copy is not None:
            return self._copy.apply(log_probabilities, tokens)
        return self._apply(_unadapted, tokens)


def _unadapted(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The function ``log_probabilities`` of the model without its adapters."""
    from peft.helpers import rescale_adapter_scale  # an optional package

    # Not disabled: from then on FSDP2 would gather parameters that need no gradient.
    with rescale_adapter_scale(model, 0.0):
        return log_probabilities(model, tokens)


def logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 logits of a ``transformers`` model: (sequences, tokens, vocabulary)."""
    scores: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return scores.float()


def log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token but the first, after all before it: (sequences, tokens)."""
    scores = logits(model, tokens[:, :-1])
    return scores.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Phases:
    """Bytes that this node sent, and seconds, by phase, since the last ``clear``."""

    def __init__(self, sent_bytes: Callable[[], int]) -> None:
        """``sent_bytes`` reads what this node has sent so far while no rank sends."""
        self._sent_bytes = sent_bytes
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._sums: dict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Begin the first phase. Collective."""
        self._sent, self._at = self._sent_bytes(), time.perf_counter()

    def end(self, phase: Phase) -> None:
        """Count all since the last phase's end as this one's. Collective."""
        sent, at = self._sent, self._at
        self.begin()
        self._sums[f"{phase}_bytes"] += self._sent - sent
        self._sums[f"{phase}_seconds"] += self._at - at

    def per_step(self, steps: int) -> dict[str, float]:
        """Means over the steps, by field of a measurement; empty where no phase has ended."""
        return {name: total / steps for name, total in self._sums.items()}


class Allocated:
    """Bytes that PyTorch's allocator for CPUs has given out since, and not got back.

    For where the CPU is the device: arenas of host memory are mapped apart, and do not count.
    Counting takes time.
    """

    def __init__(self) -> None:
        self._from = 0
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def mark(self) -> None:
        """Reset ``most``, so that it covers what comes from now on."""
        self._from = time.time_ns()

    def most(self) -> int:
        """Stop counting; returns the most bytes that were given out at once since the mark."""
        self._profiler.stop()
        kineto: Any = self._profiler.profiler
        changes: list[tuple[int, int]]
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in kineto.kineto_results.events()
            if event.name() == "[memory]"
        )
        out = accumulate(nbytes for _, nbytes in changes)
        return max(total for (at, _), total in zip(changes, out, strict=True) if at >= self._from)
