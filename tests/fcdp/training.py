"""A small language model and the training loops that parity tests compare."""

import inspect
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fcdp
from fcdp.exchange import ExchangeKind
from fcdp.grouping import PartialsChoice
from fcdp.integrations.takeover import Takeover
from tests.fcdp.extended import extend

VOCABULARY = 29
WIDTH = 12
LENGTH = 7


class Adapter(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


class Block(nn.Module):
    """Sizes of which 12 divides by all world sizes here, and 13 and 3 by few or none."""

    def __init__(self, adapter_rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH)
        self.first = Adapter(WIDTH, adapter_rank) if adapter_rank else None
        self.second = Adapter(WIDTH, adapter_rank) if adapter_rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y = self.down(F.gelu(self.up(h)))
        if self.first is not None and self.second is not None:
            y = y + self.first(h) + self.second(y)
        return x + y


class TinyLM(nn.Module):
    """A model with tied embeddings."""

    def __init__(self, adapter_rank: int, checkpointing: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(adapter_rank) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Settings:
    """One training run; picklable, so that it can be sent to ranks."""

    nodes: int = 2
    ranks_per_node: int = 2
    #: Of both adapters a block; 0: none. On 2 × 2 those of rank 1 are small enough to share one
    #: unit, those of rank 3 are not.
    adapter_rank: int = 0
    checkpointing: bool = False
    #: Class of ``tests.fcdp.extended`` of the blocks' second matrices; none: plain.
    extension: str | None = None
    accumulation: int = 1
    steps: int = 4
    clip: float | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool | None = None
    policy: fcdp.CachePolicy = fcdp.HostCache()
    look_ahead: int = 1
    detect_writes: bool = True
    verify: bool = False
    poison: bool = False
    partial_gradients: PartialsChoice = "auto"
    gather_codec: fcdp.Codec | fcdp.Delta | None = None
    reduce_codec: fcdp.Codec | fcdp.Exact | None = None
    error_feedback: bool = False
    exchanges: ExchangeKind = "hierarchical"
    #: Whether the first block is sharded over the ranks of one local rank, not over all.
    apart: bool = False
    #: Copies of the model's shards, on nodes of their own (HSDP).
    replicas: int = 1
    intra_node: Any = None
    #: Whether shards and optimizer are on the host, in memory that is page-locked on CUDA.
    offload: bool = False
    #: Event before step i: "eval" or "write".
    events: dict[int, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cache(self) -> fcdp.CacheOptions:
        return fcdp.CacheOptions(**_fields_of(self, fcdp.CacheOptions))

    @property
    def comm(self) -> fcdp.CommOptions:
        return fcdp.CommOptions(**_fields_of(self, fcdp.CommOptions))

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)

    @property
    def offload_policy(self) -> OffloadPolicy:
        return CPUOffloadPolicy() if self.offload else OffloadPolicy()


def _fields_of(settings: Settings, kind: Any) -> dict[str, Any]:
    """Values of settings by the names that the fields of a dataclass have."""
    return {each.name: getattr(settings, each.name) for each in fields(kind)}


@dataclass(frozen=True)
class Result:
    losses: list[float]
    norms: list[float]
    params: dict[str, torch.Tensor]
    ledger: dict[str, dict[str, int]] | None
    hits: int = 0
    misses: int = 0
    reduce_dtypes: set[str] = field(default_factory=set)


def topology_of(nodes: int, ranks_per_node: int) -> fcdp.Topology:
    """One topology per shape and world, on the default device: groups cost sockets."""
    return _topology_of(dist.group.WORLD, nodes, ranks_per_node)


@lru_cache
def _topology_of(world: Any, nodes: int, ranks_per_node: int) -> fcdp.Topology:
    return fcdp.Topology.build(nodes, ranks_per_node, torch.get_default_device().type)


def make_model(settings: Settings) -> TinyLM:
    torch.manual_seed(0)
    model = TinyLM(settings.adapter_rank, settings.checkpointing)
    if settings.adapter_rank:
        for name, param in model.named_parameters():
            param.requires_grad_("first" in name or "second" in name)
    if settings.extension is not None:
        extend(model, settings.extension)
    return model


def batches(settings: Settings, rank: int) -> Iterator[torch.Tensor]:
    """Micro-batches of this rank: the same for every engine."""
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator, device="cpu")
        # A loader that waited for the device would stand in for waits that are missing.
        yield tokens.to(torch.get_default_device(), non_blocking=True)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def shard_with_fsdp2(
    model: TinyLM, topology: fcdp.Topology, settings: Settings, shard: Any = fully_shard
) -> TinyLM:
    dense, kind = topology.mesh, topology.mesh.device_type
    if settings.replicas > 1:
        grid = (settings.replicas, settings.world_size // settings.replicas)
        dense = init_device_mesh(kind, grid, mesh_dim_names=("replicate", "shard"))
    for block in [*model.blocks, model]:
        mesh = dense
        if settings.apart and block is model.blocks[0]:
            grid = (settings.nodes, settings.ranks_per_node)
            mesh = init_device_mesh(kind, grid, mesh_dim_names=("inter", "intra"))["inter"]
        shard(
            block,
            mesh=mesh,
            mp_policy=settings.mp_policy,
            offload_policy=settings.offload_policy,
            reshard_after_forward=settings.reshard_after_forward,
        )
    return model


def cache_what_fsdp2_shards(model: TinyLM, topology: fcdp.Topology, settings: Settings) -> TinyLM:
    shard_with_fsdp2(model, topology, settings)
    fcdp.cache_parameters(
        model, topology, settings.policy, cache=settings.cache, comm=settings.comm
    )
    return model


def shard_with_fcdp(model: TinyLM, topology: fcdp.Topology, settings: Settings) -> TinyLM:
    named = inspect.signature(fcdp.shard).parameters
    options = {name: getattr(settings, name) for name in named if hasattr(settings, name)}
    fcdp.shard(model, topology, units=model.blocks, **options)
    return model


def take_over_from_fsdp2(model: TinyLM, topology: fcdp.Topology, settings: Settings) -> TinyLM:
    """Shard by the calls of ``fully_shard`` that another trainer makes.

    Ranks may be threads of one process: each replaces a name of its own.
    """
    takeover, owner = Takeover(), SimpleNamespace(fully_shard=fully_shard)
    takeover.use(topology, settings.policy, {})
    with takeover.of(model, owner):
        return shard_with_fsdp2(model, topology, settings, owner.fully_shard)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    # A large rate makes a stale parameter show at once; a large epsilon keeps the update from
    # turning rounding noise in tiny gradients into full steps.
    return torch.optim.AdamW(params, lr=0.03, eps=1e-3)


def take_step(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> float:
    update(loss, optimizer)
    return loss.item()


def update(loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one step on this loss, without making the host wait."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


ENGINES: dict[str, Callable[[TinyLM, fcdp.Topology, Settings], TinyLM]] = {
    "fsdp2": shard_with_fsdp2,
    "cached": cache_what_fsdp2_shards,
    "fcdp": shard_with_fcdp,
    "takeover": take_over_from_fsdp2,
}


class Run:
    """A training on this rank with an engine of ``ENGINES``, step by step."""

    def __init__(self, settings: Settings, engine: str = "fcdp") -> None:
        self.topology = topology_of(settings.nodes, settings.ranks_per_node)
        self.model = ENGINES[engine](make_model(settings), self.topology, settings)
        self.optimizer = make_optimizer(self.model)
        self.data = batches(settings, self.topology.rank)

    def loss(self) -> torch.Tensor:
        """Return the next micro-batch's loss."""
        return loss_of(self.model, next(self.data))

    def step(self) -> float:
        """Take one step; return its loss."""
        return take_step(self.loss(), self.optimizer)


def train(settings: Settings, engine: str) -> Result:
    run = Run(settings, engine)
    model, optimizer, data = run.model, run.optimizer, run.data
    # Read at the end: on an accelerator the host runs ahead.
    losses: list[Sequence[torch.Tensor]] = []
    norms: list[torch.Tensor] = []
    for step in range(settings.steps):
        losses += _event(settings.events.get(step), model, data)
        of_step: list[torch.Tensor] = []
        for micro in range(settings.accumulation):
            last = micro == settings.accumulation - 1
            defer: Any = nullcontext()
            if engine != "fsdp2" and settings.accumulation > 1:
                defer = fcdp.accumulate(model, last=last)
            with defer:
                loss = run.loss() / settings.accumulation
                loss.backward()
            of_step.append(loss.detach())
        if settings.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            norms.append(whole(norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_step)
    loss_values = [sum(loss.item() for loss in of_step) for of_step in losses]
    norm_values = [norm.item() for norm in norms]
    params = params_of(model)
    if engine == "fsdp2":
        return Result(loss_values, norm_values, params, None)
    counts = fcdp.ledger(model)
    return Result(
        loss_values,
        norm_values,
        params,
        counts.snapshot(),
        counts.hits,
        counts.misses,
        counts.reduce_dtypes,
    )


@contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Lines that the library prints within, and its warnings."""
    printed, warned = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger("fcdp").addHandler(handler)
    try:
        with redirect_stderr(printed):
            yield printed, warned
    finally:
        logging.getLogger("fcdp").removeHandler(handler)


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whole parameters by name."""
    return {name: whole(param).detach() for name, param in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _event(
    name: str | None, model: TinyLM, data: Iterator[torch.Tensor]
) -> list[Sequence[torch.Tensor]]:
    """Do what users do between steps; return losses that it produced."""
    if name == "eval":
        model.eval()
        with torch.no_grad():
            losses = [[loss_of(model, next(data))] for _ in range(2)]
        model.train()
        return losses
    if name == "write":
        # Shards change: the same bytes for every engine.
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().mul_(0.5)
    return []
