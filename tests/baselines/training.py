"""A real model, small, under any strategy: what the tests of all strategies train."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.nn as nn

import fcdp
from baselines.settings import Settings
from baselines.strategy import Trainable, load
from experiments.records.cell import FrozenDType
from experiments.worker import models, workloads
from fcdp.engine import engine_of
from tests.baselines.jobs import job
from tests.experiments.cells import cell, model_spec
from tests.experiments.golden import tables
from tests.fcdp.training import topology_of

SEQUENCE_LENGTH = 32

Family = Literal["gpt2", "llama"]
Tuning = Literal["full", "lora", "half", "head"]


@dataclass(frozen=True)
class Run:
    """One training; picklable, so that it can be sent to ranks."""

    nodes: int
    ranks_per_node: int
    accumulation: int
    family: Family | Literal["normalised"]
    tuning: Tuning
    layers: int = 4
    width: int = 16
    #: Whether blocks are computed again in backward.
    checkpointed: bool = False
    steps: int = 20
    #: Type of gathers and reductions; parameters are no narrower than float32.
    dtype: torch.dtype = torch.float64
    #: Type that frozen parameters are held in, where that is narrower.
    frozen: FrozenDType = "float32"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def made(
        self, strategy: str, settings: Settings | None = None
    ) -> tuple[Trainable, Iterator[torch.Tensor]]:
        """A training of this rank, and its micro-batches."""
        tuning = "lora" if self.tuning == "lora" else "full"
        if self.family == "normalised":
            model, blocks = normalised(self.layers)
        else:
            model, blocks = built(self.family, tuning, self.layers, self.width, self.frozen)
        if self.tuning == "half":  # the embedding and the first half of the blocks
            freeze([model.get_input_embeddings(), *blocks[: self.layers // 2]])
        if self.tuning == "head":
            freeze([model.get_input_embeddings(), *blocks])
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        if self.dtype == torch.float64:
            model.double()
        topology = topology_of(self.nodes, self.ranks_per_node)
        own = {"dtype": self.dtype, "accumulation": self.accumulation, "loss": loss}
        own |= {"settings": settings or Settings()}
        trainable = load(strategy)(model, job(topology, blocks, **own))
        return trainable, batches_of(topology.rank)


def runs(test: str) -> list[tuple[Run, dict[str, Any]]]:
    """List the runs and settings of a test's table."""
    return [(Run(*run, **dict(*more)), settings) for run, settings, *more in tables(test)]


#: Sizes and type of runs that are not compared in float64.
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "dtype": torch.float32}


class Normalised(nn.Module):
    """Blocks that end in a norm, whose gradient is that of what a block hands on."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(layers)
        )
        self.head = nn.Linear(16, 256)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return SimpleNamespace(logits=self.head(hidden))


def normalised(layers: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    torch.manual_seed(0)
    model = Normalised(layers)
    return model, [*model.blocks]


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy, in float32 or wider."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), batch[:, 1:].flatten())


def freeze(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(False)


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


def sent(run: Run, strategy: str, settings: Settings | None = None) -> Sent:
    trainable, batches = run.made(strategy, settings)
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
