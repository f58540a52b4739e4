"""Set up under inference mode, or with an embedding that is replaced afterwards."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.training import captured, topology_of
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


def shard(model: Net) -> None:
    for module in [*model.layers, model]:
        fully_shard(module, mesh=topology_of(2, 1).mesh)


def optimizer_of(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def trained(
    model: Net, steps: int = 2, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    tokens = torch.arange(6).view(2, 3) + topology_of(2, 1).rank
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for _ in range(steps):
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_ranks(2)
def test_inference_mode_is_refused_before_anything_is_changed() -> None:
    topology, refusal = topology_of(2, 1), pytest.raises(ValueError, match="inference_mode")
    model = Net()
    with torch.inference_mode(), refusal:
        fcdp.shard(model, topology)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    fcdp.shard(model, topology)
    sharded, under = Net(), Net()
    shard(sharded)
    with torch.inference_mode(), refusal:
        fcdp.cache_parameters(sharded, topology)
    fcdp.cache_parameters(sharded, topology)
    with torch.inference_mode():
        shard(under)
        made = Net()
    with refusal:
        fcdp.cache_parameters(under, topology)
    fcdp.shard(made, topology)  # of its tensors FSDP2 makes others
    losses = trained(model)
    assert losses == trained(sharded) == trained(made)


def with_adapters() -> Net:
    """Trained factors of one row, which are sharded by columns."""
    model = Net()
    for at, layer in enumerate(model.layers):
        model.layers[at] = nn.Sequential(layer, nn.Linear(4, 1), nn.Linear(1, 4))
    for name, param in model.named_parameters():
        param.requires_grad_(".1." in name or ".2." in name)
    return model


@pytest.mark.parametrize("make", [Net, with_adapters])
@on_ranks(2)
def test_the_first_forwards_are_in_inference_mode(make: Callable[[], Net]) -> None:
    """Training goes on after them, where FSDP2's own buffers would be inference tensors."""
    topology, tokens = topology_of(2, 1), torch.arange(6).view(2, 3)
    logits, losses = {}, {}
    for how in ("fsdp2", "shard", "undetected", "cache_parameters"):
        model = make()
        if how in ("shard", "undetected"):
            cache = fcdp.CacheOptions(detect_writes=how == "shard")
            fcdp.shard(model, topology, cache=cache)
        else:
            shard(model)
        if how == "cache_parameters":
            fcdp.cache_parameters(model, topology)
        optimizer = optimizer_of(model)
        with torch.inference_mode():
            logits[how] = [model(tokens).sum().item() for _ in range(2)]
        if how == "fsdp2":  # cannot train after that
            model = make()
            shard(model)
            optimizer = optimizer_of(model)
        losses[how] = trained(model, 3, optimizer)
        with torch.inference_mode():
            logits[how].append(model(tokens).sum().item())
    assert all(each == logits["fsdp2"] for each in logits.values()), logits
    assert all(each == losses["fsdp2"] for each in losses.values()), losses


@on_ranks(2)
def test_an_optimizer_is_made_after_a_forward_without_gradients() -> None:
    """It would not train the root, which FSDP2 leaves gathered, and nothing would show that."""
    for units in ([], None):
        model: Any = fcdp.shard(Net(), topology_of(2, 1), units=units)
        gc.collect()  # earlier models, whose engines refuse an optimizer of these shapes, too
        with torch.no_grad():
            model(torch.arange(6).view(2, 3))
        with pytest.raises(RuntimeError, match="of its 9 parameters are gathered copies"):
            trained(model)
        model.reshard()
        trained(model)


@pytest.mark.parametrize("own_unit", [True, False])
@pytest.mark.parametrize("only_embedding", [False, True])
@on_ranks(2)
def test_an_embedding_is_resized_after_sharding(own_unit: bool, only_embedding: bool) -> None:
    """As FSDP2 has it: each rank trains its own, of which FCDP warns."""
    topology, losses = topology_of(2, 1), {}
    for how in ("fsdp2", "shard", "undetected", "cache_parameters"):
        for before in (True, False):
            model = Net()
            for name, param in model.named_parameters():
                param.requires_grad_("embedding" in name or not only_embedding)
            units = [*model.layers, *[model.embedding] * own_unit]
            if how in ("shard", "undetected"):
                fcdp.shard(
                    model,
                    topology,
                    units=units,
                    cache=fcdp.CacheOptions(detect_writes=how == "shard"),
                )
            else:
                for module in [*units, model]:
                    fully_shard(module, mesh=topology.mesh)
                if how == "cache_parameters":
                    fcdp.cache_parameters(model, topology)
            losses[how, before] = [] if before else trained(model)
            weight: Any = model.embedding.weight
            old = weight.full_tensor().detach()
            model.embedding = nn.Embedding.from_pretrained(
                torch.cat([old, torch.ones(2, 4)]), freeze=False
            )
            with captured() as (_, warned):
                losses[how, before] += trained(model)
            told = warned.getvalue().count("embedding.weight, were added to the model after")
            assert told == (how != "fsdp2" and topology.rank == 0)
            assert losses[how, before] == losses["fsdp2", before], how
