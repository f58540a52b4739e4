"""Trainings beside FSDP2's, in float64: what differs then is no rounding."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.pipelining
import torch.nn as nn

import fcdp
from baselines.pipeline import train
from baselines.pipeline.train import Pipeline
from baselines.settings import PipelineSettings, Settings
from baselines.strategy import Trainable, load
from fcdp.engine import engine_of
from tests.baselines import training
from tests.baselines.jobs import job
from tests.baselines.training import Family
from tests.fcdp.training import topology_of

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
    #: Whether blocks are computed again in backward.
    checkpointed: bool = False
    steps: int = 20
    dtype: torch.dtype = torch.float64
    #: Type of parameters, where that is wider.
    params: torch.dtype | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def made(self, strategy: str, settings: Settings) -> tuple[Trainable, Iterable[torch.Tensor]]:
        """A training of this rank, and its micro-batches."""
        tuning = "lora" if self.tuning == "lora" else "full"
        if self.family == "normalised":
            model, blocks = normalised(self.layers)
        else:
            model, blocks = training.built(self.family, tuning, layers=self.layers, width=16)
        if self.tuning == "half":  # the embedding and the first half of the blocks
            freeze([model.get_input_embeddings(), *blocks[: self.layers // 2]])
        if self.tuning == "head":
            freeze([model.get_input_embeddings(), *blocks])
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.to(self.params or self.dtype)
        topology = topology_of(self.nodes, self.ranks_per_node)
        own = {"dtype": self.dtype, "accumulation": self.accumulation, "loss": loss}
        own |= {"settings": settings}
        trainable = load(strategy)(model, job(topology, blocks, **own))
        return trainable, training.batches_of(topology.rank)


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


@dataclass(frozen=True)
class Result:
    """Losses of a rank, and on rank 0 all parameters by name."""

    losses: list[float]
    params: dict[str, Any]
    held_out: float
    #: Bytes of the last step, by the ledger, and those that were given to a neighbour to send.
    sent: dict[str, float]
    given: int
    closed_form: float
    #: Bytes of the last step that this rank has sent to others of its group of nodes.
    inside: dict[str, int]


def kept(run: Run, settings: Settings) -> int:
    """How many of the model's parameters, as they were before it was cut, are still in memory."""
    params: list[weakref.ref[nn.Parameter]] = []

    def look(model: nn.Module, own: Any) -> None:
        params.extend(map(weakref.ref, model.parameters()))

    with training.noting(train, "look", look):
        trainable, _ = run.made("pipeline", settings)
    gc.collect()
    assert params
    assert trainable  # holds what it needs
    return sum(param() is not None for param in params)


def trained(run: Run, strategy: str, settings: Settings) -> Result:
    trainable, batches = run.made(strategy, settings)
    losses = [training.step(trainable, iter(batches)) for _ in range(run.steps - 1)]
    trainable.take_ledger()
    given: list[int] = []

    def count(operations: Any, **_: Any) -> None:
        given.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)

    with training.noting(torch.distributed.pipelining.schedules, "_batch_p2p", count):
        losses.append(training.step(trainable, iter(batches)))
    inside = inside_of(trainable)
    ledger = trainable.take_ledger() or {"inter_node": {}}
    params = whole(trainable)  # before an evaluation, after which FSDP2 leaves its root gathered
    held_out = trainable.evaluate(next(training.batches_of(7))).item()
    sent = ledger["inter_node"]
    return Result(losses, params, held_out, sent, sum(given), trainable.closed_form_bytes, inside)


def inside_of(trainable: Trainable) -> dict[str, int]:
    """Bytes by phase that FCDP has sent across nodes, inside of this rank's stages."""
    stages = trainable.stages if isinstance(trainable, Pipeline) else ()
    ledgers = [fcdp.ledger(stage).snapshot() for stage in stages if fcdp.is_cached(stage)]
    return dict(sum((Counter(each.get("inter_node", {})) for each in ledgers), Counter()))


def whole(trainable: Trainable) -> dict[str, Any]:
    """All parameters, as arrays, by the model's own names."""
    if isinstance(trainable, Pipeline):
        params = trainable.state()
    else:
        params = {
            name: param.full_tensor()  # type: ignore[attr-defined]
            for name, param in trainable.model.named_parameters()
        }
    return {name: param.detach().numpy() for name, param in params.items()}


def sent(run: Run, settings: PipelineSettings) -> tuple[float, int]:
    """Look at what FCDP sends across nodes in the second step of this rank's one stage.

    Returns the share of gathers that is sent before the stage's first forward, and the bytes of
    reductions that are sent before its last gradient is handed back, or computed.
    """
    trainable, batches = run.made("pipeline", settings)
    assert isinstance(trainable, Pipeline)
    training.step(trainable, iter(batches))
    (stage,) = trainable.stages
    # Also in the first step, in which PyTorch looks at shapes.
    assert fcdp.ledger(stage).misses == len(engine_of(stage).units)
    trainable.take_ledger()
    kind = torch.distributed.pipelining.PipelineStage
    gathered, reduced = list[int](), [0]

    def forward(*_: Any, **__: Any) -> None:
        gathered.append(inside_of(trainable).get("forward", 0))

    def hand_back(*_: Any, **__: Any) -> None:
        reduced.append(inside_of(trainable).get("reduce", 0))

    with (
        training.noting(kind, "forward_one_chunk", forward),
        training.noting(kind, "get_bwd_send_ops", hand_back),
    ):
        training.step(trainable, iter(batches))
    inside = inside_of(trainable)
    assert inside["forward"] == inside["reduce"]
    return gathered[0] / inside["forward"], reduced[-1]
