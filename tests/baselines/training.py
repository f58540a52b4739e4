"""A real model, small, under any strategy: what the tests of all strategies train."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.nn as nn

import fcdp
from baselines.settings import Settings as StrategySettings
from baselines.strategy import Trainable, load
from experiments.records.cell import FrozenDType
from experiments.worker import models, workloads
from fcdp.engine import engine_of
from tests.baselines.jobs import job
from tests.experiments.cells import cell, model_spec
from tests.fcdp.training import topology_of

SEQUENCE_LENGTH = 32

Family = Literal["gpt2", "llama"]
Tuning = Literal["full", "lora"]


@dataclass(frozen=True)
class Settings:
    """One training run; picklable, so that it can be sent to ranks."""

    family: Family
    tuning: Tuning
    nodes: int = 2
    ranks_per_node: int = 1
    accumulation: int = 1
    #: Type of gathers and reductions; parameters are float32.
    dtype: torch.dtype = torch.float32
    #: Type that frozen parameters are held in, where that is narrower.
    frozen: FrozenDType = "float32"
    #: The strategy's own settings.
    chosen: StrategySettings = field(default_factory=StrategySettings)


def built(
    family: Family,
    tuning: Tuning = "full",
    layers: int = 2,
    width: int = 32,
    frozen: FrozenDType = "float32",
) -> tuple[nn.Module, Sequence[nn.Module]]:
    """A model, the same on all ranks, and its blocks."""
    spec = model_spec(family, layers=layers, width=width, heads=2)
    own = {"model": spec, "tuning": tuning, "sequence_length": SEQUENCE_LENGTH}
    own |= {"frozen_dtype": frozen}
    return models.build(cell("fsdp2", **own))


def batches_of(rank: int = 0) -> Iterator[torch.Tensor]:
    """Endless micro-batches of two sequences."""
    return workloads.micro_batches(
        workloads.corpus(), rank=rank, seed=0, sequences=2, sequence_length=SEQUENCE_LENGTH
    )


def made(strategy: str, settings: Settings) -> tuple[Trainable, Iterator[torch.Tensor]]:
    """A training of this rank, and its micro-batches."""
    model, blocks = built(settings.family, settings.tuning, frozen=settings.frozen)
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    own = {"accumulation": settings.accumulation, "settings": settings.chosen}
    trainable = load(strategy)(model, job(topology, blocks, dtype=settings.dtype, **own))
    return trainable, batches_of(topology.rank)


def step(trainable: Trainable, batches: Iterator[torch.Tensor]) -> float:
    """The loss of a step."""
    return trainable.step([next(batches) for _ in range(trainable.job.accumulation)]).item()


class Sent(NamedTuple):
    """Losses of two steps, and the bytes that a node sends in the second, by link and phase."""

    losses: list[float]
    ledger: dict[str, dict[str, float]]
    #: The closed form.
    least: float
    #: Bytes of all sums that wait where FCDP accumulates gradients on two nodes of two ranks.
    sums: int

    @property
    def across(self) -> dict[str, float]:
        return self.ledger["inter_node"]


def sent(strategy: str, settings: Settings) -> Sent:
    trainable, batches = made(strategy, settings)
    losses = [step(trainable, batches)]
    trainable.take_ledger()
    losses.append(step(trainable, batches))
    ledger = trainable.take_ledger()
    units = engine_of(trainable.model).units if fcdp.is_cached(trainable.model) else ()
    # Each of a node's two ranks adds up two nodes' shards, in float32.
    sums = 2 * 2 * 4 * sum(unit.shard_numel for unit in units if unit.trainable)
    return Sent(losses, ledger or {}, trainable.closed_form_bytes, sums)


def noting(owner: Any, name: str, note: Callable[..., object]) -> Any:
    """Call ``note`` with the arguments of each call of a function or method, before it is made."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    return mock.patch.object(owner, name, call)
