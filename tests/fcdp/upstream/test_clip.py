"""Norms of gradients and their clipping, of every order, and scaled gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from tests.fcdp.upstream.models import VOCABULARY, Transformer, mlps
from tests.fcdp.upstream.running import Run, adam, cases


def local_norms(model: nn.Module, order: float) -> list[float]:
    return [
        torch.linalg.vector_norm(param.grad.to_local(), ord=order).item()
        for param in model.parameters()
        if param.grad is not None
    ]


@cases((2.0, False), (1.0, False), (float("inf"), False), (2.0, True))
def test_clip_grad_norm(run: Run, order: float, frozen: bool) -> None:
    model = Transformer(2)
    if frozen:
        model.embedding.requires_grad_(False)
        model.layers[0].mlp.requires_grad_(False)
    run.shard(model.units())
    run.cache(model)
    optimizer = adam(model)
    limit = 0.01
    for step in range(4):
        optimizer.zero_grad()
        model(run.tokens(VOCABULARY, 3, 8, step=step)).square().sum().backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(
            model.parameters(), limit, norm_type=order, foreach=True
        )
        assert norm.full_tensor() > limit, "nothing was clipped"
        run.see(f"norm {step}", norm.full_tensor())
        assert max(local_norms(model, order)) <= limit * (1 + 1e-6)
        run.see_gradients(model)
        optimizer.step()
    run.see_params(model)


@cases((True,), (False,))
def test_a_gradient_scaler(run: Run, bad: bool) -> None:
    """What the scaler finds in one rank's shard, it finds on all."""
    model = mlps(2, 6)
    run.shard([*model, model])
    run.cache(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for step in range(4):
        loss = model(run.input(4, 6, step=step)).sum()
        run.see(f"loss {step}", loss)
        scaler.scale(loss).backward()
        if bad and step == 1 and run.topology.rank == 0:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.to_local().view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        run.see_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.see(f"scale {step}", scaler.get_scale())
    run.see_params(model)
