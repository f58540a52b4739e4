"""Micro-batches of a step: what is given up does not leak, what some of them use is summed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fcdp
from tests.fcdp.training import Run, Settings, loss_of, topology_of
from tests.ranks import on_ranks

SETTINGS = Settings(2, 1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.full_tensor() for param in model.parameters() if param.grad is not None]  # type: ignore[attr-defined]


def after_giving_up(how: str, ahead: bool) -> float:
    """The worst difference of a step's gradients from one without a step given up before it.

    ``ahead``: gradients that have crossed nodes already were there when the micro-batches began.
    """
    run = Run(SETTINGS)
    model = run.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach="foreach" in how)
    tokens, other = next(run.data), next(run.data)

    def step() -> list[torch.Tensor]:
        for last in (False, True):
            with fcdp.accumulate(model, last=last):
                loss_of(model, tokens).backward()
        found = gradients(model)
        optimizer.zero_grad()
        return found

    expected = step()
    if ahead:
        loss_of(model, other).backward()
    for _ in range(2):
        with fcdp.accumulate(model, last=False):
            loss_of(model, other).backward()
    if "discard" in how:
        optimizer.zero_grad(set_to_none=False)
        fcdp.discard(model)
        optimizer.zero_grad()
    elif how == "detached":
        for param in model.parameters():
            param.grad.detach().zero_()  # type: ignore[union-attr]
    else:
        optimizer.zero_grad(set_to_none="none" in how)
    if "zero" in how:
        assert not any(bool(grad.any()) for grad in gradients(model)), "zeroed is zero"
    if "plain" in how:
        (2 * loss_of(model, tokens)).backward()
        found = gradients(model)
    else:
        found = step()
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        "none",
        "zero",
        "foreach, zero",
        "detached",
        "foreach, discard",
        "none, plain backward",
        "foreach, zero, plain backward",
    ],
)
@on_ranks(2)
def test_micro_batches_of_a_step_that_was_given_up_do_not_leak(how: str) -> None:
    for ahead in (False, True):
        assert after_giving_up(how, ahead) < 1e-6, ahead


@pytest.mark.parametrize("ahead", [False, True])
@on_ranks(2)
def test_a_gradient_that_waits_cannot_be_read(ahead: bool) -> None:
    """Nor do attempts change the step's gradients."""
    found = []
    for engine in ("fcdp", "fsdp2"):
        run, cached = Run(SETTINGS, engine), engine == "fcdp"
        model = run.model
        micro_batches = [next(run.data) for _ in range(3)]
        if ahead:
            loss_of(model, micro_batches[0]).backward()
        for tokens in micro_batches:
            last = tokens is micro_batches[-1]
            with fcdp.accumulate(model, last=last) if cached else contextlib.nullcontext():
                loss_of(model, tokens).backward()
            if cached and not last:
                _refuse_reads([*model.parameters()])
        found.append(gradients(model))
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max()) < 1e-6  # another order of sums


def _refuse_reads(params: list[Any]) -> None:
    some = torch.zeros_like(params[0])
    for read in (
        lambda: params[0].grad.full_tensor(),
        lambda: params[0].grad.to_local().sum(),
        lambda: params[0].grad.norm(),
        lambda: params[0].grad.div_(2),
        lambda: some.add_(params[0].grad),
        lambda: torch._foreach_mul_([param.grad for param in params], 0.5),
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
    ):
        with pytest.raises(RuntimeError, match="not known before it has crossed nodes"):
            read()
    assert "Waiting" in repr(params[0].grad)


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


#: The layers that each micro-batch of each step uses.
USED = ([["0", "0"]], [["01", "0"]], [["01", "0", "1", "01"]], [["01", "1"], ["0", "0"], ["01"]])


@on_ranks(2)
def test_what_only_some_micro_batches_use_is_reduced_with_the_last() -> None:
    """And what none of them uses has no gradient, as with FSDP2: no optimizer moves it."""
    cases = [*product(USED, (True, False)), ([["0", "1"]], True)]
    differences = [some_layers_per_micro_batch(*case) for case in cases]
    assert max(differences) < 1e-5, differences
    # Sums of more than two micro-batches alone have another order.
    assert sum(found > 1e-30 for found in differences) <= 2, differences


@pytest.mark.parametrize("own_units", [True, False])
@on_ranks(2)
def test_zero_grad_within_a_micro_batch_gives_up_what_it_does_before_one(own_units: bool) -> None:
    """As with FSDP2, what only the step before used has no gradient, which momentum would move."""
    topology = topology_of(2, 1)
    x, model = torch.full((1, 4), 1.0), Branches()
    for module in [*(model.layers if own_units else []), model]:
        fully_shard(module, mesh=topology.mesh)
    fcdp.cache_parameters(model, topology)
    with fcdp.accumulate(model, last=False):
        model(x, "01").backward()
    for last in (False, True):
        with fcdp.accumulate(model, last=last):
            if not last:
                model.zero_grad()
            model(x, "0").backward()
    assert [param.grad is not None for param in model.parameters()] == [True, True, False, False]
