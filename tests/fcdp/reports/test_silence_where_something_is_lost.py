"""One sentence, once, where each rank trains a copy of its own or gradients cross nodes again."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn

import fcdp
from tests.fcdp.training import (
    Run,
    Settings,
    batches,
    captured,
    loss_of,
    make_model,
    shard_with_fcdp,
    topology_of,
    update,
)
from tests.ranks import on_ranks

PLAIN = Settings(2, 1)
ADDED, AGAIN = "were added to the model after it was sharded", "cross nodes a second time"


@pytest.mark.parametrize("engine", ["fcdp", "takeover"])
@on_ranks(2)
def test_an_adapter_is_added_after_sharding(engine: str) -> None:
    run = Run(PLAIN, engine)
    with captured() as (_, warned):
        run.step()
        assert ADDED not in warned.getvalue()
        block: Any = run.model.blocks[0]
        block.down.adapter = nn.Linear(2, 2)
        adapter = [*block.down.adapter.parameters()]
        run.optimizer.add_param_group({"params": adapter})
        for _ in range(3):
            run.step()
    assert warned.getvalue().count(ADDED) == (run.topology.rank == 0)
    assert ("blocks.0.down.adapter.weight" in warned.getvalue()) == (run.topology.rank == 0)


@on_ranks(2)
def test_nothing_is_said_of_ignored_parameters_and_other_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ignored: Any = model[0].bias
    fcdp.shard(model, topology_of(2, 1), units=[model[0]], ignored_params=[ignored])
    model[0] = nn.Sequential(model[0])  # its parameters have other names now
    other = nn.Linear(2, 2)
    with captured() as (_, warned):
        for of in (model, other):
            optimizer = torch.optim.SGD([p for p in of.parameters() if p is not ignored], lr=0.1)
            optimizer.add_param_group({"params": [ignored] if of is model else []})
            update(of(torch.ones(1, 2)).sum(), optimizer)
    assert warned.getvalue() == ""


def micro_batches(run: Run, accumulates: bool) -> None:
    for last in (False, True):
        with fcdp.accumulate(run.model, last=last) if accumulates else contextlib.nullcontext():
            run.loss().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@on_ranks(2)
def test_micro_batches_without_accumulate(ranks_per_node: int) -> None:
    run = Run(Settings(2 // ranks_per_node, ranks_per_node))
    with captured() as (_, warned):
        for _ in range(3):
            run.step()  # one backward per step
        run.loss().backward()
        run.optimizer.zero_grad()  # a step that was skipped
        run.step()
        run.loss().backward()
        run.optimizer.zero_grad(set_to_none=False)
        run.step()
        (run.loss() + run.loss()).backward()  # both cross in one backward
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.step()
        assert warned.getvalue() == ""
        for _ in range(3):
            micro_batches(run, accumulates=False)
    crosses = ranks_per_node == 1
    assert warned.getvalue().count(AGAIN) == crosses * (run.topology.rank == 0)


@on_ranks(2)
def test_who_uses_accumulate_is_told_nothing() -> None:
    run = Run(PLAIN)
    with captured() as (_, warned):
        micro_batches(run, accumulates=True)
        micro_batches(run, accumulates=False)
    assert warned.getvalue() == ""


def taking_turns(model: nn.Module, adapter: str) -> None:
    for name, param in model.named_parameters():
        if "first" in name or "second" in name:
            param.requires_grad_(adapter in name)


@pytest.mark.parametrize("all_require", [False, True])
@on_ranks(2)
def test_adapters_take_turns(all_require: bool) -> None:
    """One that is frozen when the model is sharded lies with the base, which crosses with it."""
    settings, topology = Settings(2, 1, adapter_rank=1), topology_of(2, 1)
    model, data, sent = make_model(settings), batches(settings, topology.rank), []
    taking_turns(model, "" if all_require else "first")
    with captured() as (_, warned):
        shard_with_fcdp(model, topology, settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for turn in ("first", "first", "second", "first", "second", "first"):
            taking_turns(model, turn)
            fcdp.ledger(model).reset()
            update(loss_of(model, next(data)), optimizer)
            of_step = fcdp.ledger(model).snapshot()["inter_node"]
            sent.append(of_step["forward"] + of_step.get("backward", 0))
    told = warned.getvalue()
    mixes = not all_require
    assert told.count("trained parameters among frozen") == mixes * (topology.rank == 0)
    assert (f": {sent[-1]:,} bytes per rank" in told) == bool(told)
    assert mixes == (sent[-1] > sent[1])
