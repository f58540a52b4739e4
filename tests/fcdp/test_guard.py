"""Writes that nothing shows: healed before a pass on the CPU, an error where it is too late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

import fcdp
from fcdp.engine import engine_of
from fcdp.guard import Guard
from tests.fcdp.stand_ins import CPU, STREAMS, StandInUnit
from tests.fcdp.training import WIDTH, Block, Run, Settings, loss_of
from tests.ranks import Pools, on_ranks

FROZEN = Settings(2, 1, adapter_rank=3, reshard_after_forward=True)


@on_ranks(2)
def test_a_write_between_passes_is_gathered_anew() -> None:
    for detects in (True, False):
        run = Run(replace(FROZEN, detect_writes=detects))
        model, tokens = run.model, next(run.data)
        loss_of(model, tokens).backward()
        if run.topology.rank == 1:  # alone
            for param in model.blocks.parameters():
                param.data.mul_(2)
        with torch.no_grad():
            found = loss_of(model, tokens).item()
            fcdp.invalidate(model)
            same = found == loss_of(model, tokens).item()
        # Who wrote has its own shard in any case; the other sees the write by the guard alone.
        assert same == (detects or run.topology.rank == 1)


@on_ranks(2)
def test_a_write_within_a_pass_is_an_error_on_all_ranks_at_the_next() -> None:
    run = Run(FROZEN)
    model, tokens = run.model, next(run.data)
    loss = loss_of(model, tokens)
    for param in model.blocks.parameters():
        param.data.mul_(2)
    loss.backward()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"blocks\..*written where nothing shows it"):
            loss_of(model, tokens)
        found = loss_of(model, tokens).item()
        fcdp.invalidate(model)
        assert found == loss_of(model, tokens).item(), "all units are gathered anew after the error"


class Event:
    """One that the host sees when told to."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Queue:
    """A stream whose copies run when the host is told that they have."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


def on_an_accelerator() -> tuple[Guard, Queue]:
    """A guard of two units, the second of which has a mismatch, and its stream of copies."""
    copies = Queue()
    streams: Any = SimpleNamespace(
        copies_out=copies, inter_node=Queue(), current=lambda: None, on=STREAMS.on, on_host=False
    )
    units: list[Any] = [StandInUnit(name, 8) for name in "ab"]
    guard = Guard(units, CPU, streams)
    guard._differ[1] = True
    guard._landing = SimpleNamespace(  # type: ignore[assignment]
        copy_=lambda source, non_blocking: setattr(guard, "_copied", source.tolist()),
        tolist=lambda: guard._copied,  # type: ignore[attr-defined]
    )
    return guard, copies


def test_flags_are_looked_at_when_they_have_landed() -> None:
    guard, copies = on_an_accelerator()
    assert guard.found() == [False, False]  # the first copy is only asked for
    assert guard.found() == [False, False]  # not landed: nobody waits, nothing is asked again
    assert [event.done for event in copies.events] == [False]
    copies.events[0].done = True
    assert guard.found() == [False, True]
    assert [event.done for event in copies.events] == [True, False]


def test_flags_are_waited_for_where_the_device_is_more_than_a_pass_behind() -> None:
    guard, copies = on_an_accelerator()
    assert [guard.found() for _ in range(3)] == [[False, False], [False, False], [False, True]]
    assert [event.done for event in copies.events] == [True, False]


def test_all_that_was_compared_can_be_waited_for() -> None:
    guard, copies = on_an_accelerator()
    guard.land()
    assert [event.done for event in copies.events] == [True]
    assert guard.found() == [False, True]


@pytest.mark.parametrize("end", ["save", "export", "publish"])
@on_ranks(2)
def test_what_the_last_pass_used_is_an_error_where_the_model_is_written(
    end: str, tmp_path: Path
) -> None:
    run = Run(FROZEN)
    model, loss = run.model, run.loss()
    for param in model.blocks.parameters():
        param.data.mul_(2)
    loss.backward()
    with pytest.raises(RuntimeError, match="written where nothing shows it"):
        if end == "save":
            fcdp.save(model, run.optimizer, tmp_path)
        elif end == "publish":
            fcdp.publish(model, tmp_path)
        else:
            fcdp.export(model, tmp_path)
    assert [*tmp_path.iterdir()] == []


NARROW = Settings(
    3, 1, param_dtype=torch.bfloat16, gather_codec=fcdp.BlockInt8(8), reshard_after_forward=True
)


def evaluations(settings: Settings, how: str) -> tuple[list[tuple[float, float]], list[int]]:
    """Evaluations after writes that nothing shows, each beside what a gather anew gives.

    As on an accelerator, where no pass with gradients compares contents. Also returns how often the
    host has waited for that, up to each pass.
    """
    run = Run(settings)
    model = run.model
    staleness, guard = engine_of(model).staleness, engine_of(model)._guard
    assert guard is not None
    staleness._compares = False
    tokens = next(run.data)
    waits: list[int] = []
    type(model.blocks[1]).part = Block.forward  # type: ignore[attr-defined]
    register_fsdp_forward_method(model.blocks[1], "part")

    def evaluate() -> float:
        with torch.no_grad():
            if how == "block":
                return float(model.blocks[1](torch.ones(1, 5, WIDTH)).sum())
            if how == "method":
                return float(model.blocks[1].part(torch.ones(1, 5, WIDTH)).sum())  # type: ignore[operator]
            if how == "unshard":
                model.blocks[1].unshard()
                found = float(model.blocks[1].up.weight.sum())
                model.blocks[1].reshard()
                return found
            return float(loss_of(model, tokens))

    found: list[tuple[float, float]] = []
    with mock.patch.object(guard, "check", wraps=guard.check) as check:
        for _ in range(2):
            run.step()
            waits.append(check.call_count)
            evaluate()
            for ranks in ({0}, {*range(settings.world_size)}, set()):
                if run.topology.rank in ranks:
                    for param in model.blocks.parameters():
                        param.data.mul_(1.5)
                fcdp.ledger(model).reset()
                got, misses = evaluate(), fcdp.ledger(model).misses
                assert bool(misses) == bool(ranks), "gathered anew what was written, and only that"
                waits.append(check.call_count)
                found.append((got, 0.0))
                if ranks:
                    fcdp.invalidate(model)
                    found[-1] = (got, evaluate())
                else:
                    found[-1] = (got, found[-2][1])
    return found, waits


@pytest.mark.parametrize(
    ("settings", "how"),
    [(NARROW, "model"), (FROZEN, "block"), (FROZEN, "method"), (FROZEN, "unshard")],
)
def test_a_pass_without_gradients_compares_before_it_uses(
    ranks: Pools, settings: Settings, how: str
) -> None:
    for found, waits in ranks.run(settings.world_size, evaluations, settings, how):
        assert all(got == expected for got, expected in found)
        assert len({got for got, _ in found}) == 4
        # One each: none in a step.
        assert waits == [0, 2, 4, 6, 6, 8, 10, 12]
