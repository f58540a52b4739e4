"""Micro-batches of a step: what is given up does not leak, what some of them use is summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fcdp
from tests.fcdp.training import Settings, batches, loss_of, make_model, shard_with_fcdp, topology_of
from tests.ranks import Pools

SETTINGS = Settings(2, 1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters() if param.grad is not None]  # type: ignore[attr-defined]


def after_giving_up(how: str) -> tuple[float, str]:
    """The worst difference of a step's gradients from one without a step given up before it."""
    topology = topology_of(2, 1)
    model = shard_with_fcdp(make_model(SETTINGS), topology, SETTINGS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=how == "foreach, discard")
    data = batches(SETTINGS, topology.rank)
    tokens, other = next(data), next(data)

    def step() -> list[torch.Tensor]:
        for last in (False, True):
            with fcdp.accumulate(model, last=last):
                loss_of(model, tokens).backward()
        found = gradients(model)
        optimizer.zero_grad()
        return found

    expected, refused = step(), ""
    with fcdp.accumulate(model, last=False):
        loss_of(model, other).backward()
    if how == "set to none":
        optimizer.zero_grad()
    elif how == "set to zero":
        optimizer.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError) as error:
            step()
        refused = str(error.value)
        optimizer.zero_grad()
    elif how == "plain backward":
        optimizer.zero_grad()
        (2 * loss_of(model, tokens)).backward()
        found = gradients(model)
        return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), ""
    else:
        optimizer.zero_grad(set_to_none=False)
        fcdp.discard(model)
        optimizer.zero_grad()
    found = step()
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), refused


@pytest.mark.parametrize(
    "how", ["set to none", "set to zero", "foreach, discard", "plain backward"]
)
def test_micro_batches_of_a_step_that_was_given_up_do_not_leak(ranks: Pools, how: str) -> None:
    for difference, refused in ranks.run(2, after_giving_up, how):
        assert difference < 1e-6
        assert ("fcdp.discard(model)" in refused) == (how == "set to zero")


class Branches(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x).square().sum()


def one_layer_per_micro_batch() -> float:
    """The worst difference from FSDP2, of gradients after two micro-batches of different layers."""
    topology = topology_of(2, 1)
    x = torch.full((1, 4), 1.0 + topology.rank)
    found: list[list[torch.Tensor]] = []
    for cached in (False, True):
        model = Branches()
        for module in [*model.layers, model]:
            fully_shard(module, mesh=topology.mesh)
        if cached:
            fcdp.cache_parameters(model, topology)
        for micro in range(2):
            if cached:
                with fcdp.accumulate(model, last=micro == 1):
                    model(x, micro).backward()
            else:
                model(x, micro).backward()
        found.append(gradients(model))
    plain, ours = found
    return max(float((a - b).abs().max()) for a, b in zip(plain, ours, strict=True))


def test_a_unit_of_an_early_micro_batch_alone_is_reduced_with_the_last(ranks: Pools) -> None:
    assert ranks.run(2, one_layer_per_micro_batch) == [0.0, 0.0]


def sum_of_large_gradients(micro_batches: int) -> tuple[float, float]:
    """The gradient of one weight in fp16 reduction, by FSDP2 and here."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    topology = topology_of(2, 1)
    found: list[float] = []
    for cached in (False, True):
        model: Any = nn.Sequential(nn.Linear(2, 1, bias=False))
        nn.init.ones_(model[0].weight)
        for module in (model[0], model):
            fully_shard(
                module,
                mesh=topology.mesh,
                mp_policy=MixedPrecisionPolicy(torch.float32, torch.float16),
            )
        if cached:
            fcdp.cache_parameters(model, topology)
        x = torch.full((1, 2), 2.0**14)
        for micro in range(micro_batches):
            if cached:
                with fcdp.accumulate(model, last=micro == micro_batches - 1):
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        found.append(float(model[0].weight.grad.full_tensor().max()))
    return found[0], found[1]


def test_a_sum_that_fp16_cannot_hold_does_not_overflow(ranks: Pools) -> None:
    """Eight times 2**14 is more than fp16's 65,504; FSDP2 adds up in the parameters' dtype."""
    assert ranks.run(2, sum_of_large_gradients, 8) == [(2.0**17, 2.0**17)] * 2
