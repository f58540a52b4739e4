"""A small language model and its training, alike for FSDP2 and FCDP, bit for bit reproducible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fcdp

#: Widths that no number of ranks divides, so that shards are padded.
_VOCABULARY, _WIDTH, _HIDDEN, _LENGTH = 101, 60, 93, 16
_BLOCKS, _ADAPTER_RANK = 2, 3


@dataclass(frozen=True)
class Recipe:
    """What is trained, and by which engine."""

    #: ``None``: FSDP2.
    policy: fcdp.CachePolicy | None
    #: Only adapters of low rank are trained; the rest is frozen.
    lora: bool = False
    gather_codec: fcdp.Codec | None = None
    reduce_codec: fcdp.Codec | None = None
    micro_batches: int = 1
    steps: int = 4
    param_dtype: torch.dtype | None = None
    #: In an imitated world sums are this rank's own: both engines must divide them alike.
    force_sums: bool = False


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    params: dict[str, torch.Tensor]
    #: Gathers that the cache served; ``None`` for FSDP2.
    hits: int | None

    def equals(self, other: Trained) -> bool:
        """Bit for bit; NaN, which equals nothing, included."""
        return self.losses == other.losses and all(
            torch.equal(param, other.params[name]) for name, param in self.params.items()
        )

    def distance(self, other: Trained) -> float:
        """The largest relative difference of a loss."""
        pairs = zip(self.losses, other.losses, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def deterministic() -> None:
    """The same order of sums in every kernel. Before the first product on the device."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would fill each new tensor on the device: an order of operations that nobody trains with.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class _Block(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _WIDTH)
        self.adapter = nn.Sequential() if not lora else _adapter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y: torch.Tensor = self.down(F.gelu(self.up(h)))
        return x + y + self.adapter(h) if len(self.adapter) else x + y


def _adapter() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(_WIDTH, _ADAPTER_RANK, bias=False), nn.Linear(_ADAPTER_RANK, _WIDTH, bias=False)
    )


class Model(nn.Module):
    def __init__(self, lora: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block(lora) for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def train(recipe: Recipe, topology: fcdp.Topology, device: torch.device) -> Trained:
    """Train on this rank; on all ranks alike but for the data."""
    torch.manual_seed(0)
    model = Model(recipe.lora).to(device)  # made on the host: the same numbers on every device
    if recipe.lora:
        for name, param in model.named_parameters():
            param.requires_grad_("adapter" in name)
    _shard(model, recipe, topology)
    trained = [param for param in model.parameters() if param.requires_grad]
    # A large rate makes a stale parameter show at once; a large epsilon keeps the update from
    # turning rounding noise in tiny gradients into full steps.
    optimizer = torch.optim.AdamW(trained, lr=0.03, eps=1e-3)
    data = _batches(topology.rank, device)
    losses = [_step(model, optimizer, data, recipe).item() for _ in range(recipe.steps)]
    params = {name: _whole(param) for name, param in model.named_parameters()}
    return Trained(losses, params, None if recipe.policy is None else fcdp.ledger(model).hits)


def _shard(model: Model, recipe: Recipe, topology: fcdp.Topology) -> None:
    precision = MixedPrecisionPolicy(param_dtype=recipe.param_dtype, reduce_dtype=torch.float32)
    if recipe.policy is None:
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=topology.mesh, mp_policy=precision)
    else:
        fcdp.shard(
            model,
            topology,
            units=model.blocks,
            policy=recipe.policy,
            mp_policy=precision,
            gather_codec=recipe.gather_codec,
            reduce_codec=recipe.reduce_codec,
        )
    if recipe.force_sums:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def _step(
    model: Model, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor], recipe: Recipe
) -> torch.Tensor:
    total = torch.zeros(())
    for index in range(recipe.micro_batches):
        defer: Any = contextlib.nullcontext()
        if recipe.policy is not None and recipe.micro_batches > 1:
            defer = fcdp.accumulate(model, last=index == recipe.micro_batches - 1)
        with defer:
            tokens = next(data)
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten()) / recipe.micro_batches
            loss.backward()
        total = total + loss.detach().cpu()
    optimizer.step()
    optimizer.zero_grad()
    return total


def _batches(rank: int, device: torch.device) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        yield torch.randint(_VOCABULARY, (4, _LENGTH), generator=generator).to(device)


def _whole(param: torch.Tensor) -> torch.Tensor:
    whole = param.full_tensor() if isinstance(param, DTensor) else param
    return whole.detach().cpu()
