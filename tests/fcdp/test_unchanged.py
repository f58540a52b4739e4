"""Forwards between which nobody writes: one agreement, and every write is seen all the same."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import fcdp
from fcdp import staleness
from tests.fcdp.training import Run, Settings, loss_of
from tests.ranks import Pools, on_ranks

SETTINGS = Settings(2, 1)


def generated(engine: str) -> tuple[list[torch.Tensor], list[int]]:
    """Losses of forwards around an optimizer step, and how often the ranks had agreed by then."""
    run = Run(SETTINGS, engine)
    model, batch = run.model, next(run.data)
    loss_of(model, batch).backward()
    found: list[torch.Tensor] = []
    times = []
    with mock.patch.object(staleness, "any_rank", wraps=staleness.any_rank) as agree:

        def forwards() -> None:
            with torch.no_grad():
                found.extend(loss_of(model, batch) for _ in range(4))
            times.append(agree.call_count)

        with fcdp.unchanged(model) if engine == "fcdp" else nullcontext():
            forwards()
            run.optimizer.step()
            forwards()
        forwards()
    return found, times


@on_ranks(2)
def test_the_ranks_agree_once_and_a_step_is_seen() -> None:
    ours, times = generated("fcdp")
    theirs, _ = generated("fsdp2")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert ours[0] != ours[4]
    assert times == [1, 2, 6], "once, again after the step, and then before each forward"


def written(how: str) -> str:
    run = Run(SETTINGS)
    model, batch = run.model, next(run.data)
    weight = model.blocks[1].down.weight
    with torch.no_grad():
        try:
            with fcdp.unchanged(model):
                loss_of(model, batch)
                weight.data.mul_(0.5) if how == "data" else weight.mul_(0.5)
                loss_of(model, batch)
            loss_of(model, batch)
        except RuntimeError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(("how", "problem"), [("data", "shows it"), ("place", "in place since")])
def test_a_write_is_an_error(apart: Pools, how: str, problem: str) -> None:
    assert all(problem in said for said in apart.run(2, written, how))
