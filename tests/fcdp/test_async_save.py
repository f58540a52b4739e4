"""``torch.distributed.checkpoint.async_save`` of a cached model, beside further steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, adam
from tests.ranks import on_ranks


def step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model(run.input(4, 6, step=number)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, helpers: bool) -> Any:
    """By PyTorch's helpers, or by hand, as small scripts do."""
    if helpers:
        model_state, optim_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optim_state}
    return {"model": model.state_dict()}


def save_beside_training(path: Path, cached: bool, helpers: bool) -> list[float]:
    """Two steps, a save that goes on beside two more, then the saved state and the two again."""
    run = Run(topology_of(2, 1), cached=cached)
    model = mlps(2, 6)
    run.shard([*model, model])
    run.cache(model)
    optimizer = adam(model) if helpers else torch.optim.SGD(model.parameters(), lr=0.05)
    group = dist.new_group(backend="gloo")  # the saving thread must not meet FSDP2's collectives
    losses = [step(run, model, optimizer, number) for number in range(2)]
    saving = checkpoint.async_save(
        state_of(model, optimizer, helpers=helpers), checkpoint_id=path, process_group=group
    )
    losses += [step(run, model, optimizer, number) for number in (2, 3)]
    saving.result()
    state = state_of(model, optimizer, helpers=helpers)
    checkpoint.load(state, checkpoint_id=path)
    if helpers:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    else:
        model.load_state_dict(state["model"])
    again = [step(run, model, optimizer, number) for number in (2, 3)]
    assert again == losses[2:]
    run.check_gathers()
    return losses


@pytest.mark.parametrize("helpers", [True, False], ids=["helpers", "by hand"])
@on_ranks(2)
def test_steps_beside_an_asynchronous_save(tmp_path: Path, helpers: bool) -> None:
    plain = save_beside_training(tmp_path / "plain", False, helpers)
    assert save_beside_training(tmp_path / "cached", True, helpers) == plain
    assert len(set(plain)) == 4
