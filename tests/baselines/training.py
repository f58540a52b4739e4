"""A real model, small, under any strategy: what the tests of all strategies train."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn as nn

from baselines.settings import Settings as StrategySettings
from baselines.strategy import Trainable, load
from experiments.worker import models, workloads
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
    #: Of the gather and the reduction; parameters are float32.
    dtype: torch.dtype = torch.float32
    #: Of what is frozen, where that is narrower.
    frozen: torch.dtype | None = None
    #: The strategy's own.
    chosen: StrategySettings = field(default_factory=StrategySettings)


def train(strategy: str, settings: Settings, steps: int) -> tuple[nn.Module, list[float]]:
    """The trained model, and this rank's loss of each step."""
    model, trainable, batches = _made(strategy, settings)
    losses = [_step(trainable, batches, settings.accumulation) for _ in range(steps)]
    return model, losses


def made(strategy: str, settings: Settings) -> tuple[Trainable, Iterator[torch.Tensor]]:
    """What is to be trained on this rank, and its micro-batches."""
    _, trainable, batches = _made(strategy, settings)
    return trainable, batches


def _made(strategy: str, settings: Settings) -> tuple[nn.Module, Trainable, Iterator[torch.Tensor]]:
    spec = model_spec(settings.family, layers=2, width=32, heads=2)
    model, blocks = models.build(
        cell(strategy, model=spec, tuning=settings.tuning, sequence_length=SEQUENCE_LENGTH)
    )
    if settings.frozen is not None:
        models.hold_frozen(model, settings.frozen)
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    own = {"accumulation": settings.accumulation, "settings": settings.chosen}
    trainable = load(strategy)(model, job(topology, blocks, dtype=settings.dtype, **own))
    batches = workloads.micro_batches(
        workloads.corpus(), rank=topology.rank, seed=0, sequences=2, sequence_length=SEQUENCE_LENGTH
    )
    return model, trainable, batches


def _step(trainable: Trainable, batches: Iterator[torch.Tensor], accumulation: int) -> float:
    return trainable.step([next(batches) for _ in range(accumulation)]).item()
