"""Hooks on gradients see what they see with FSDP2, or accumulation refuses them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import fcdp
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, cases
from tests.ranks import Pools


def sharded(run: Run) -> nn.Sequential:
    model = mlps(2, 4)
    run.shard([*model, model])
    return model


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@cases(("gathered",), ("sharded",), ("before",))
def test_hooks_on_gradients(run: Run, when: str) -> None:
    """Hooks that double a gradient, on parameters before sharding, after it, or while gathered."""
    model = mlps(2, 4)
    seen: list[float] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(float(local(gradient).abs().sum()))
        return gradient * 2

    def register() -> None:
        for param in model.parameters():
            param.register_hook(double)

    if when == "before":
        register()
    run.shard([*model, model])
    if when == "sharded":
        register()
    run.cache(model)
    if when == "gathered":
        for layer in model:
            layer.unshard()
        register()
        for layer in model:
            layer.reshard()
    for step in range(2):
        model(run.input(4, 4, step=step)).sum().backward()
        run.see(f"calls {step}", len(seen))
        run.see_gradients(model)
    run.see("gradients", torch.tensor(seen))


@cases((True,), (False,))
def test_an_optimizer_in_backward(run: Run, reshard: bool) -> None:
    """Each parameter is stepped in backward, as soon as its gradient is there."""
    model = mlps(3, 4)
    run.shard([*model, model], reshard_after_forward=reshard)
    run.cache(model)
    optimizers = {
        param: torch.optim.AdamW([param], lr=0.05, eps=1e-3) for param in model.parameters()
    }

    def step_and_forget(param: torch.Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_forget)
    for step in range(4):
        loss = model(run.input(4, 4, step=step)).sum()
        run.see(f"loss {step}", loss)
        loss.backward()
        run.see_params(model)


def accumulated(register: str) -> tuple[list[float], list[float], str]:
    """What a hook sees of one parameter in each micro-batch, what FSDP2 would have shown it, and
    the refusal if there was one."""
    runs: dict[bool, list[float]] = {}
    refusal = ""
    for cached in (False, True):
        run = Run(topology_of(2, 1), cached=cached)
        model = sharded(run)
        for layer in model:
            layer.set_force_sum_reduction_for_comms(True)  # as FCDP does on the CPU
        run.cache(model)
        seen: list[float] = []

        def look(gradient: torch.Tensor, seen: list[float] = seen) -> None:
            seen.append(float(local(gradient).abs().sum()))

        hook_on(model, register, look)
        try:
            for micro in range(3):
                last = micro == 2
                scope: Any = contextlib.nullcontext()
                if cached:
                    scope = fcdp.accumulate(model, last=last)
                else:
                    model.set_requires_gradient_sync(last)
                with scope:
                    model(run.input(4, 4, step=micro)).sum().backward()
        except (RuntimeError, ValueError) as error:
            refusal = str(error)
        runs[cached] = seen
    return runs[True], runs[False], refusal


def hook_on(model: nn.Module, kind: str, look: Any) -> None:
    param = next(model.parameters())
    if kind == "post_accumulate":
        param.register_post_accumulate_grad_hook(lambda param: look(param.grad))
    else:
        first = next(module for module in model.children() if isinstance(module, FSDPModule))
        first.set_all_reduce_hook(look)


@pytest.mark.parametrize("register", ["post_accumulate", "all_reduce"])
def test_hooks_under_accumulate_see_the_sum_or_are_refused(ranks: Pools, register: str) -> None:
    """As when FSDP2 does not synchronise: once, in the last micro-batch, and never zeros."""
    for seen, expected, refusal in ranks.run(2, accumulated, register):
        assert len(expected) == 1
        if refusal:
            assert seen == []
            assert "hook" in refusal
            assert "fcdp.accumulate" in refusal
        else:
            assert seen == pytest.approx(expected, rel=1e-5)
