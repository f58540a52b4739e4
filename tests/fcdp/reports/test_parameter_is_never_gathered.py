"""Parameters that somebody else reads than the module that holds them are gathered for the reader.

Smallest case: ``nn.MultiheadAttention`` of which only ``out_proj`` is trained, which it never
calls. Beside FSDP2, with small adapters, which stay gathered, and with large ones, which do not.
"""

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import captured, topology_of
from tests.ranks import on_ranks

WIDTH = 8


class Attention(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.attention(self.base(x), x, x, need_weights=False)[0]


class Parts(nn.Module):
    """Holds what its parent's parent reads."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(WIDTH, rank), nn.Linear(rank, WIDTH)
        self.called = nn.Linear(WIDTH, WIDTH, bias=False)


class Reader(nn.Module):
    """Reads ``early`` before it calls ``called``, and ``late`` after that."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4 * WIDTH)
        self.inner = nn.ModuleDict({"parts": Parts(rank)})
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        parts: Any = self.inner["parts"]
        y = torch.tanh(F.linear(x, parts.early.weight, parts.early.bias))
        y = F.linear(y, parts.late.weight) * parts.called(x).sigmoid()
        return x + self.back(F.gelu(self.base(y))) + parts.late.bias

    def extra(self, x: torch.Tensor) -> Any:
        parts: Any = self.inner["parts"]
        return x + self.base(F.linear(x, parts.called.weight)).sum(-1, keepdim=True)


class Lists(nn.Module):
    """As IA3 and LoHa hold them: one list or dictionary beside each frozen layer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.factors = nn.ParameterList([torch.randn(rank, WIDTH), torch.randn(WIDTH, rank)])
        self.scales = nn.ParameterDict({"default": torch.randn(4 * WIDTH)})

    def forward(self, x: torch.Tensor) -> Any:
        first, second = self.factors
        y = x + F.linear(F.linear(x, first), second)
        return x + self.back(self.base(y) * self.scales["default"])


class Mixed(nn.Module):
    """Trained biases of frozen weights, and a trained scale that the block holds itself."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.back = nn.Linear(WIDTH, rank * WIDTH), nn.Linear(rank * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.back(self.base(x).relu()) * self.scale


class Net(nn.Module):
    """Three blocks and a head that only the loss of training reads."""

    def __init__(self, kind: type[nn.Module], rank: int, recomputes: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind(rank) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.recomputes = recomputes
        self.without: nn.Module | None = None
        for name, param in self.named_parameters():
            trained = ("out_proj", "parts", "factors", "scales", "head", "scale", "k.bias")
            param.requires_grad_(any(part in name for part in trained))

    def forward(self, x: torch.Tensor, loss: str = "") -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            if layer is self.without:
                continue
            if self.recomputes is not None and torch.is_grad_enabled():
                x = x if x.requires_grad else x.detach().requires_grad_()
                x = checkpoint(layer, x, use_reentrant=self.recomputes)
            else:
                x = layer(x)
        x = self.norm(x)
        if loss == "outside":
            return x
        return F.linear(x, self.head.weight) if loss == "fused" else self.head(x)


def set_up(
    how: str, kind: type[nn.Module], rank: int, recomputes: bool | None = None, **options: Any
) -> Net:
    """``how``: FSDP2, ``cache_parameters``, or ``shard`` with ``detect_writes`` on or off."""
    topology, model = topology_of(2, 1), Net(kind, rank, recomputes)
    reshard = options.pop("reshard_after_forward", None)
    if how.startswith("shard"):
        detect = how == "shard"
        cache = fcdp.CacheOptions(detect_writes=detect)
        fcdp.shard(model, topology, reshard_after_forward=reshard, cache=cache, **options)
        assert len(engine_of(model).units) > 4  # something has been split off
        return model
    for module in [*model.layers, model]:
        fully_shard(module, mesh=topology.mesh, reshard_after_forward=reshard)
    if how == "cache_parameters":
        fcdp.cache_parameters(model, topology)
    return model


def batches(count: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(topology_of(2, 1).rank)
    for _ in range(count):
        yield torch.randn(2, 3, WIDTH, generator=generator)


def loss_of(model: Net, x: torch.Tensor, loss: str = "fused") -> Any:
    out = model(x, loss)
    if loss == "outside":
        out = F.linear(out, model.head.weight)
    return out.square().mean()


def trained(model: Net, event: str = "") -> list[float]:
    """Losses of three steps, and of evaluations that call the head which training reads."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    cached, losses, layers = fcdp.is_cached(model), [], list[Any](model.layers)
    for step, x in enumerate(batches(4)):
        if event == "evaluates" or step == 3:
            with torch.no_grad():
                losses.append(float(loss_of(model, x, event if event == "outside" else "")))
        if event == "skips":
            model.without = model.layers[step % 3]
        if event == "by hand":
            for layer in layers:
                layer.unshard()
            for layer in layers:  # what later ones read is still there
                losses.append(float(sum(p.detach().square().sum() for p in layer.parameters())))
                layer.reshard()
        for last in (False, True) if event == "accumulates" else (True,):
            accumulates = event == "accumulates" and cached
            with fcdp.accumulate(model, last=last) if accumulates else contextlib.nullcontext():
                loss = loss_of(model, x, "outside" if event == "outside" else "fused")
                if event == "two forwards":
                    loss = loss + loss_of(model, x + 1)
                if event == "method":
                    loss = loss + sum(layer.extra(x).square().mean() for layer in layers)
                loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


#: Ranks of the adapters: those that stay gathered together, and those of a unit per block.
SMALL, LARGE = 1, 16
HOWS = ("shard", "shard, undetected", "cache_parameters")
CASES = [
    (Attention, SMALL, ""),
    (Reader, SMALL, ""),
    (Reader, LARGE, ""),
    (Lists, SMALL, ""),
    (Lists, LARGE, "evaluates"),
    (Mixed, SMALL, ""),
    (Mixed, LARGE, "two forwards"),
    *product([Reader], [SMALL, LARGE], ["outside", "skips", "by hand", "method"]),
    (Attention, SMALL, "two forwards"),
    (Reader, LARGE, "two forwards"),
    (Reader, SMALL, "accumulates"),
    *product([Lists, Attention], [LARGE], ["accumulates", "by hand"]),
]


@pytest.mark.parametrize(("kind", "rank", "event"), CASES)
@on_ranks(2)
def test_what_its_reader_reads_is_gathered(kind: type[nn.Module], rank: int, event: str) -> None:
    losses = {}
    for how in ("fsdp2", *HOWS):
        model = set_up(how, kind, rank)
        if event == "method":
            for layer in model.layers:
                register_fsdp_forward_method(layer, "extra")
        losses[how] = trained(model, event)
    assert len(set(losses["fsdp2"])) > 3
    for how in HOWS:
        assert losses[how] == losses["fsdp2"], how


@pytest.mark.parametrize(
    ("reshard", "recomputes", "event"),
    [
        (None, False, ""),
        (None, True, ""),
        (None, True, "accumulates"),
        (True, None, ""),
        (False, None, ""),
        (True, False, ""),
    ],
)
@on_ranks(2)
def test_what_its_reader_reads_is_there_in_backward(
    reshard: bool | None, recomputes: bool | None, event: str
) -> None:
    for kind, rank in ((Attention, SMALL), (Reader, SMALL), (Reader, LARGE), (Lists, LARGE)):
        losses = [
            trained(set_up(how, kind, rank, recomputes, reshard_after_forward=reshard), event)
            for how in ("fsdp2", "shard")
        ]
        assert losses[0] == losses[1], (kind, rank)


@pytest.mark.parametrize(("kind", "rank"), [(Lists, SMALL), (Reader, LARGE), (Mixed, LARGE)])
@on_ranks(2)
def test_only_what_is_trained_crosses_after_the_first_step(
    kind: type[nn.Module], rank: int
) -> None:
    with captured() as (_, warned):
        model = set_up("shard", kind, rank)
    assert warned.getvalue() == ""
    list_of = [*batches(3)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    sent = []
    for x in list_of:
        fcdp.ledger(model).reset()
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts = fcdp.ledger(model).snapshot()["inter_node"]
        sent.append(counts["forward"] + counts.get("backward", 0))
    trained_bytes = sum(unit.shard_bytes for unit in engine_of(model).units if unit.trainable)
    assert sent[0] > trained_bytes
    assert sent[1:] == [trained_bytes] * 2
    assert not any(
        unit.group.is_unsharded
        for unit in engine_of(model).units
        if isinstance(unit.module, FSDPModule) and unit.name != "root"
    )
