"""Trainings beside FSDP2's, in float64: what differs then is no rounding."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.pipelining
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import fcdp
from baselines.pipeline import cached, train
from baselines.pipeline.train import Pipeline
from baselines.settings import PipelineSettings, Settings
from baselines.strategy import Trainable, load
from fcdp import fsdp2
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
    look = train.look

    def noted(model: nn.Module, own: Any) -> Any:
        params.extend(map(weakref.ref, model.parameters()))
        return look(model, own)

    with mock.patch.object(train, "look", noted):
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
    send = torch.distributed.pipelining.schedules._batch_p2p

    def count(operations: Any, **more: Any) -> Any:
        given.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations, **more)

    with mock.patch("torch.distributed.pipelining.schedules._batch_p2p", count):
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


def after_a_step(run: Run, settings: PipelineSettings) -> tuple[Pipeline, Iterable[torch.Tensor]]:
    """Return a pipeline that has trained its first step, and its batches."""
    trainable, batches = run.made("pipeline", settings)
    assert isinstance(trainable, Pipeline)
    training.step(trainable, iter(batches))
    return trainable, batches


@dataclass(frozen=True)
class Held:
    """The most bytes that a rank holds of its stages in a step."""

    #: All parameters of its stages, and the largest unit's.
    parameters: int
    largest: int
    #: Gathered units while a block computes, and whole gradients after a micro-batch.
    gathered: int
    gradients: int
    #: Sums that wait: partial gradients, or sharded ones in ``.grad``.
    sums: int


def held(run: Run, settings: PipelineSettings) -> Held:
    """Look at each block's forward and backward of the second step, and after each backward."""
    trainable, batches = after_a_step(run, settings)
    modules = [each for stage in trainable.stages for each in stage.modules()]
    shards = [each for each in modules if isinstance(each, FSDPModule)]
    groups = [group for each in shards for group in fsdp2.param_groups(each)]
    sizes = {group: sum(param.nbytes for param in fsdp2.sharded_params(group)) for group in groups}
    gathered, gradients, sums = [0], [0], [0]

    def computing(*_: object) -> None:
        gathered.append(sum(sizes[group] for group in groups if group.is_unsharded))

    def after(*_: object) -> None:
        having = chain.from_iterable(map(fsdp2.with_gradients, groups))
        gradients.append(sum(param.sharded_param.nbytes for param in having))
        cached = [stage for stage in trainable.stages if fcdp.is_cached(stage)]
        waiting = sum(fcdp.ledger(stage).pending_bytes for stage in cached)
        params = [param for group in groups for param in fsdp2.sharded_params(group)]
        there = [] if waiting else [param for param in params if param.grad is not None]
        sums.append(waiting + sum(param.grad.to_local().nbytes for param in there))

    for stage in trainable.stages:
        for part in chain.from_iterable(block.children() for block in stage.blocks):
            part.register_forward_hook(computing)
            part.register_full_backward_pre_hook(computing)
    kind = torch.distributed.pipelining.PipelineStage
    weights = cached.stage_backward_weight

    def looking(backward: Any) -> Any:
        def and_look(*args: Any, **more: Any) -> None:
            backward(*args, **more)
            after()

        return and_look

    def and_look_before(*args: Any) -> None:
        computing()
        after()
        weights(*args)

    with (
        mock.patch.object(kind, "backward_one_chunk", looking(kind.backward_one_chunk)),
        mock.patch.object(
            kind, "backward_weight_one_chunk", looking(kind.backward_weight_one_chunk)
        ),
        mock.patch.object(cached, "stage_backward_weight", and_look_before),
    ):
        training.step(trainable, iter(batches))
    most = max(gathered), max(gradients), max(sums)
    return Held(sum(sizes.values()), max(sizes.values()), *most)


@dataclass(frozen=True)
class Sent:
    """Bytes that a stage's FCDP has sent across nodes in a step, up to some moments of it."""

    #: Gathers across nodes of the first step, in which PyTorch looks at shapes, too; and units.
    misses: int
    units: int
    #: Bytes of gathers: before the stage's first forward, and by the end of the step.
    gathered_before: int
    gathered: int
    #: Bytes of reductions: when the last gradient is handed back, or computed, and by the end.
    reduced_before: int
    reduced: int


def sent(run: Run, settings: PipelineSettings) -> Sent:
    """Look at the second step of this rank's one stage."""
    trainable, batches = after_a_step(run, settings)
    (stage,) = trainable.stages
    misses, units = fcdp.ledger(stage).misses, len(engine_of(stage).units)
    trainable.take_ledger()
    kind = torch.distributed.pipelining.PipelineStage
    forward, hand_back = kind.forward_one_chunk, kind.get_bwd_send_ops
    moments: dict[str, list[int]] = {"forward": [], "reduce": []}

    def and_look_before(self: Any, *args: Any, **more: Any) -> Any:
        moments["forward"].append(inside_of(trainable).get("forward", 0))
        return forward(self, *args, **more)

    def and_look(self: Any, micro_batch: int) -> Any:
        moments["reduce"].append(inside_of(trainable).get("reduce", 0))
        return hand_back(self, micro_batch)

    with (
        mock.patch.object(kind, "forward_one_chunk", and_look_before),
        mock.patch.object(kind, "get_bwd_send_ops", and_look),
    ):
        training.step(trainable, iter(batches))
    gathers, reductions = moments["forward"], moments["reduce"]
    inside = inside_of(trainable)
    before = reductions[-1] if reductions else 0
    return Sent(misses, units, gathers[0], inside["forward"], before, inside["reduce"])
