"""What makes entries stale, and that all ranks decide alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import (
    WIDTH,
    Block,
    Run,
    Settings,
    TinyLM,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    topology_of,
)
from tests.ranks import Pools

# The adapters of each block have a unit of their own.
SETTINGS = Settings(2, 1, adapter_rank=3, reshard_after_forward=True)


ADAPTERS = ["blocks.0.first.down", "blocks.1.first.down"]
#: Events between two forwards, and the units that the second gathers anew on both ranks.
STALE: dict[str, list[str] | None] = {
    "nothing": [],
    "forget_optimizer": [],
    "state_dict": [],
    "step": ADAPTERS,
    "fused_step": ADAPTERS[:1],  # fused kernels leave the version counters as they are
    "write_after_assign": ["blocks.1"],
    "write_on_rank_1": ["blocks.1"],
    "local_write_on_rank_1": ["blocks.1"],
    "write_into_state_dict_on_rank_1": ["blocks.1"],
    "load": None,  # all of them
    "load_of_a_layer": ["blocks.1"],
    "load_through_data": None,  # by modules' own ways, as quantised ones have them
    "load_assign": None,
    "data_write": None,
}


def stale_units(event: str) -> list[str] | None:
    """Run two forwards with ``event`` in between; return what the second gathered anew."""
    run = Run(SETTINGS)
    model, topology, engine = run.model, run.topology, engine_of(run.model)
    fused = torch.optim.AdamW(list(model.blocks[0].first.parameters()), fused=True)
    weight = model.blocks[1].up.weight
    if event in ("load_assign", "write_after_assign"):
        assign(model)
        weight = model.blocks[1].up.weight
    run.loss().backward()
    generations = {unit: entry.generation for unit, entry in engine.entries.items()}
    with torch.no_grad():
        if event == "step":
            run.optimizer.step()
        elif event == "fused_step":
            fused.step()
        elif event == "load":
            model.load_state_dict(model.state_dict())
        elif event == "load_of_a_layer":
            model.blocks[1].up.load_state_dict(model.blocks[1].up.state_dict())
        elif event == "load_through_data":
            for module in model.modules():
                module._load_from_state_dict = lambda *_: None  # the same values, and no trace
            model.load_state_dict(model.state_dict())
        elif event == "load_assign":
            assign(model)
        elif event == "write_after_assign":
            weight.mul_(2)
        elif event.endswith("write_on_rank_1") and topology.rank == 1:
            (weight.to_local() if "local" in event else weight).mul_(2)
        elif event == "state_dict":
            model.state_dict()
        elif event == "write_into_state_dict_on_rank_1":
            state = model.state_dict()
            if topology.rank == 1:
                # As torch.distributed.checkpoint loads: behind an alias, where no version grows.
                state["blocks.1.up.weight"].detach().to_local().mul_(2)
        elif event == "data_write":
            for param in model.parameters():
                param.data.mul_(2)
            fcdp.invalidate(model)
        elif event == "forget_optimizer":
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step()
    counts = fcdp.ledger(model)
    counts.reset()
    run.loss()
    stale = [
        unit.name for unit, entry in engine.entries.items() if entry.generation > generations[unit]
    ]
    assert counts.misses == len(stale)
    return stale if len(stale) < len(engine.units) else None


def assign(model: TinyLM) -> None:
    """Put new tensors in place of all parameters: no version counter grows."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def stale_of_each() -> dict[str, list[str] | None]:
    return {event: stale_units(event) for event in STALE}


def test_what_makes_units_stale_does_on_all_ranks_and_nothing_else(ranks: Pools) -> None:
    assert ranks.run(2, stale_of_each) == [STALE, STALE]


def load_into_an_old_state(directory: str) -> None:
    """The same with a ``state_dict`` that was taken passes ago, and nothing else that looks."""
    run = Run(replace(SETTINGS, reshard_after_forward=None, detect_writes=False))
    model, tokens = run.model, next(run.data)
    state = model.state_dict()

    def loss() -> float:
        with torch.no_grad():
            found = loss_of(model, tokens).item()
        model.reshard()  # the root's own unit stays gathered otherwise
        return found

    expected = loss()
    checkpoint.save({"model": state}, checkpoint_id=directory)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    changed = [loss(), loss()]
    checkpoint.load({"model": state}, checkpoint_id=directory)
    after = loss()
    watched = engine_of(model).staleness._watched.values()
    assert all(each.contents is not None for each in watched)
    del state
    loss()
    assert all(each.contents is None for each in watched), "nobody can write into it any more"
    assert changed[0] == changed[1] != expected
    assert after == expected


def test_a_state_dict_is_watched_for_as_long_as_it_lives(ranks: Pools, tmp_path: Path) -> None:
    ranks.run(2, load_into_an_old_state, str(tmp_path))


def write_between_forward_and_backward() -> str:
    topology = topology_of(2, 1)
    settings = Settings(2, 1)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    loss = loss_of(model, next(batches(settings, topology.rank)))
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="blocks.1: parameters were written in place") as error:
        loss.backward()
    return str(error.value)


def test_a_write_in_mid_step_is_an_error_that_names_the_unit(ranks: Pools) -> None:
    assert all(
        "fcdp.invalidate" in message for message in ranks.run(2, write_between_forward_and_backward)
    )


# Passes over parts of a model


def by_forward(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def small_adapters_around_a_write(by_optimizer: bool) -> bool:
    """Whether a part's pass after a write uses it, in adapters that stay gathered after forward."""
    run = Run(Settings(2, 2, adapter_rank=1))
    model = run.model
    assert engine_of(model)._kept, "FCDP chose to keep them gathered"
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    x = torch.ones(2, WIDTH)
    run.loss().backward()
    with torch.no_grad():
        before = by_forward(model.blocks[0], x)
        if by_optimizer:
            optimizer.step()
        else:
            for param in trained:
                param.mul_(1.5)
        seen = by_forward(model.blocks[0], x)
        fcdp.invalidate(model)
        engine_of(model)._kept[0].module.reshard()
        expected = by_forward(model.blocks[0], x)
    return not torch.equal(before, expected) and torch.equal(seen, expected)


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_what_stays_gathered_is_gathered_anew_after_a_pass_without_gradients(
    ranks: Pools, by_optimizer: bool
) -> None:
    """No backward lets go of it, and nothing that is gathered already is looked at."""
    assert ranks.run(4, small_adapters_around_a_write, by_optimizer) == [True] * 4


def misses_of_given_up_steps() -> list[int]:
    """Gathers across nodes in each pass of a model that stays gathered, and is never stepped."""
    run = Run(Settings(2, 1, reshard_after_forward=False))
    counts = [0]
    for _ in range(4):
        run.loss().backward()
        run.model.zero_grad()
        counts.append(fcdp.ledger(run.model).misses)
    return [after - before for before, after in pairwise(counts)]


def test_what_was_passed_over_and_missed_is_kept_from_then_on(ranks: Pools) -> None:
    """Nothing is kept of what a step will change; the guess that one comes is wrong here."""
    for first, second, *more in ranks.run(2, misses_of_given_up_steps):
        assert first == second > 0
        assert more == [0, 0]
