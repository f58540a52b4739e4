"""Micro-batches of a step: what is given up does not leak, what some of them use is summed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
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
    """Uses some of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        return sum((self.layers[int(place)](x).square().sum() for place in used), torch.zeros(()))


def some_layers_per_micro_batch(steps: Sequence[Sequence[str]], own_units: bool) -> float:
    """The worst difference from FSDP2 of all steps' gradients; the same parameters have some."""
    topology = topology_of(2, 1)
    x = torch.full((1, 4), 1.0 + topology.rank)
    found: list[list[dict[str, torch.Tensor]]] = []
    for cached in (False, True):
        model = Branches()
        for module in [*(model.layers if own_units else []), model]:
            fully_shard(module, mesh=topology.mesh)
        if cached:
            fcdp.cache_parameters(model, topology)
        found.append([])
        for micro_batches in steps:
            for place, used in enumerate(micro_batches):
                last = place == len(micro_batches) - 1
                with fcdp.accumulate(model, last=last) if cached else contextlib.nullcontext():
                    model(x, used).backward()
            grads: dict[str, Any] = {name: param.grad for name, param in model.named_parameters()}
            found[-1].append(
                {name: grad.full_tensor() for name, grad in grads.items() if grad is not None}
            )
            model.zero_grad()
    plain, ours = found
    assert [[*grads] for grads in ours] == [[*grads] for grads in plain]
    differences = [
        float((grads[name] - expected[name]).abs().max())
        for grads, expected in zip(ours, plain, strict=True)
        for name in expected
    ]
    return max(differences)


@pytest.mark.parametrize("own_units", [True, False])
@pytest.mark.parametrize(
    "steps",
    [[["0", "0"]], [["01", "0"]], [["01", "0", "1", "01"]], [["01", "1"], ["0", "0"], ["01"]]],
    ids=str,
)
def test_what_only_some_micro_batches_use_is_reduced_with_the_last(
    ranks: Pools, steps: Sequence[Sequence[str]], own_units: bool
) -> None:
    """And what none of them uses has no gradient, as with FSDP2: no optimizer moves it."""
    differences = ranks.run(2, some_layers_per_micro_batch, steps, own_units)
    assert max(differences) < (1e-5 if max(map(len, steps)) > 2 else 1e-30)  # another order of sums


def test_a_unit_of_an_early_micro_batch_alone_is_reduced_with_the_last(ranks: Pools) -> None:
    assert ranks.run(2, some_layers_per_micro_batch, [["0", "1"]], True) == [0.0, 0.0]


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
