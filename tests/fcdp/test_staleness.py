"""What makes entries stale, and that all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import WIDTH, Run, Settings, loss_of
from tests.ranks import on_ranks

# The adapters of each block have a unit of their own.
SETTINGS = Settings(2, 1, adapter_rank=3, reshard_after_forward=True)


ADAPTERS = ["blocks.0.first.down", "blocks.1.first.down"]


def step_of_first_adapters(run: Run) -> None:
    """By fused kernels, which leave the version counters as they are."""
    torch.optim.AdamW(list(run.model.blocks[0].first.parameters()), fused=True).step()  # type: ignore[union-attr]


def write_on_rank_1(run: Run) -> None:
    if run.topology.rank == 1:
        run.model.blocks[1].up.weight.mul_(2)


def local_write_on_rank_1(run: Run) -> None:
    if run.topology.rank == 1:
        run.model.blocks[1].up.weight.to_local().mul_(2)  # type: ignore[operator]


def write_into_a_state_dict_on_rank_1(run: Run) -> None:
    """As torch.distributed.checkpoint loads: behind an alias, where no version grows."""
    state = run.model.state_dict()
    if run.topology.rank == 1:
        state["blocks.1.up.weight"].detach().to_local().mul_(2)  # type: ignore[operator]


def load_of_a_layer(run: Run) -> None:
    layer = run.model.blocks[1].up
    layer.load_state_dict(layer.state_dict())


def load_through_data(run: Run) -> None:
    """By modules' own ways, as quantised ones have them: the same values, and no trace."""
    for module in run.model.modules():
        module._load_from_state_dict = lambda *_: None  # type: ignore[method-assign]
    run.model.load_state_dict(run.model.state_dict())


def assign(run: Run) -> None:
    """Put new tensors in place of all parameters: no version counter grows."""
    state = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def data_write(run: Run) -> None:
    for param in run.model.parameters():
        param.data.mul_(2)
    fcdp.invalidate(run.model)


Event = Callable[[Run], object]
#: Events before the first of two forwards and between them, and the units that the second
#: gathers anew on both ranks; ``None``: all of them.
EVENTS: list[tuple[Event | None, Event, list[str] | None]] = [
    (None, lambda run: None, []),
    (None, lambda run: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).step(), []),
    (None, lambda run: run.model.state_dict(), []),
    (None, lambda run: run.optimizer.step(), ADAPTERS),
    (None, step_of_first_adapters, ADAPTERS[:1]),
    (assign, lambda run: run.model.blocks[1].up.weight.mul_(2), ["blocks.1"]),
    (None, write_on_rank_1, ["blocks.1"]),
    (None, local_write_on_rank_1, ["blocks.1"]),
    (None, write_into_a_state_dict_on_rank_1, ["blocks.1"]),
    (None, lambda run: run.model.load_state_dict(run.model.state_dict()), None),
    (None, load_of_a_layer, ["blocks.1"]),
    (None, load_through_data, None),
    (assign, assign, None),
    (None, data_write, None),
]


@on_ranks(2)
def test_what_makes_units_stale_does_on_all_ranks_and_nothing_else() -> None:
    for number, (before, between, expected) in enumerate(EVENTS):
        run = Run(SETTINGS)
        engine, counts = engine_of(run.model), fcdp.ledger(run.model)
        if before is not None:
            before(run)
        run.loss().backward()
        generations = {unit: entry.generation for unit, entry in engine.entries.items()}
        with torch.no_grad():
            between(run)
        counts.reset()
        run.loss()
        entries = engine.entries.items()
        stale = [unit.name for unit, entry in entries if entry.generation > generations[unit]]
        every = [unit.name for unit in engine.units]
        assert stale == (every if expected is None else expected), (number, stale)
        assert counts.misses == len(stale), number


@on_ranks(2)
def test_a_state_dict_is_watched_for_as_long_as_it_lives(tmp_path: Path) -> None:
    """One that was taken passes ago, where nothing else looks."""
    run = Run(replace(SETTINGS, reshard_after_forward=None, detect_writes=False))
    model, tokens = run.model, next(run.data)
    state = model.state_dict()

    def loss() -> float:
        with torch.no_grad():
            found = loss_of(model, tokens).item()
        model.reshard()  # the root's own unit stays gathered otherwise
        return found

    expected = loss()
    checkpoint.save({"model": state}, checkpoint_id=tmp_path)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    changed = [loss(), loss()]
    checkpoint.load({"model": state}, checkpoint_id=tmp_path)
    after = loss()
    watched = engine_of(model).staleness._watched.values()
    assert all(each.contents is not None for each in watched)
    del state
    loss()
    assert all(each.contents is None for each in watched), "nobody can write into it any more"
    assert changed[0] == changed[1] != expected
    assert after == expected


@on_ranks(2)
def test_a_write_in_mid_step_is_an_error_that_names_the_unit() -> None:
    run = Run(Settings(2, 1))
    loss = run.loss()
    with torch.no_grad():
        run.model.blocks[1].up.weight.mul_(2)
    said = r"^blocks\.1: parameters were written in place.*fcdp\.invalidate"
    with pytest.raises(RuntimeError, match=said):
        loss.backward()


@pytest.mark.parametrize("by_optimizer", [True, False])
@on_ranks(4)
def test_what_stays_gathered_is_gathered_anew_after_a_pass_without_gradients(
    by_optimizer: bool,
) -> None:
    """Small adapters do. No backward lets go of them, and what is gathered is not looked at."""
    run = Run(Settings(2, 2, adapter_rank=1))
    model = run.model
    assert engine_of(model)._kept, "FCDP chose to keep them gathered"
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    x = torch.ones(2, WIDTH)
    run.loss().backward()
    with torch.no_grad():
        before = model.blocks[0](x)
        if by_optimizer:
            optimizer.step()
        else:
            for param in trained:
                param.mul_(1.5)
        seen = model.blocks[0](x)
        fcdp.invalidate(model)
        engine_of(model)._kept[0].module.reshard()
        expected = model.blocks[0](x)
    assert not torch.equal(before, expected)
    assert torch.equal(seen, expected)


@on_ranks(2)
def test_what_was_passed_over_and_missed_is_kept_from_then_on() -> None:
    """Nothing is kept of what a step will change; the guess that one comes is wrong here."""
    run, misses = Run(Settings(2, 1, reshard_after_forward=False)), []
    for _ in range(4):
        fcdp.ledger(run.model).reset()
        run.loss().backward()
        run.model.zero_grad()
        misses.append(fcdp.ledger(run.model).misses)
    assert misses[0] == misses[1] > 0
    assert misses[2:] == [0, 0], misses
