"""Frozen and trained parameters, in one group and across groups, frozen early or late."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed._composable import checkpoint

from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, adam, cases, train


@cases(
    (True, False, "before"),
    (True, True, "before"),
    (True, False, "sharded"),
    (False, True, "sharded"),
    (True, True, "cached"),
    (False, False, "cached"),
)
def test_frozen_and_trained_in_one_group(
    run: Run, reshard: bool, checkpointing: bool, when: str
) -> None:
    """Weights are frozen before ``fully_shard``, after it, or after FCDP is set up."""
    model = mlps(3, 8)

    def freeze() -> None:
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)

    if when == "before":
        freeze()
    if checkpointing:
        for mlp in model:
            checkpoint(mlp)
    run.shard([*model, model], reshard_after_forward=reshard)
    optimizer = adam(model)
    if when == "sharded":
        freeze()
    run.cache(model)
    if when == "cached":
        freeze()
    train(run, model, optimizer, lambda step: model(run.input(8, 8, step=step)).sum())


@cases((True, True), (True, False), (False, True), (False, False))
def test_frozen_and_trained_groups_in_turn(run: Run, reshard: bool, unfreeze: bool) -> None:
    """Every other layer is frozen; between a forward without gradients, and a late thaw."""
    torch.manual_seed(42)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    for layer in layers[::2]:
        layer.requires_grad_(False)
    run.set_up(model, [*layers, model], reshard_after_forward=reshard)
    optimizer = adam(model)
    steps = 5
    for step in range(steps):
        if unfreeze and step == steps - 2:
            model.requires_grad_(True)
        x = run.input(8, 8, step=step)
        if step == 1:
            with torch.no_grad():
                run.see(f"loss {step}", model(x).sum())
            continue
        loss = model(x).sum()
        loss.backward()
        run.see(f"loss {step}", loss)
        run.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    run.see_params(model)
