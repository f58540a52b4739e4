"""Writes that contents alone show, on an accelerator: healed in time, or an error soon after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.staleness import Staleness
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import Run, Settings, loss_of
from tests.ranks import Pools, on_ranks

SETTINGS = Settings(adapter_rank=3)


def by_data(param: DTensor) -> None:
    param.data.mul_(0.5)


def by_collective(param: DTensor) -> None:
    """As a trainer that averages replicas of its own."""
    shard = param.to_local().detach()
    dist.all_reduce(shard, op=dist.ReduceOp.MAX)


WRITES: dict[str, Callable[[DTensor], None]] = {
    function.__name__: function for function in (by_data, by_collective)
}


def write(model: Any, name: str, *, alone: bool) -> None:
    """Write to the weights of the second block, which are frozen; on one rank alone if asked."""
    param = model.blocks[1].down.weight
    if not alone or name == "by_collective" or dist.get_rank() == 3:
        WRITES[name](param)


def evaluate_after(name: str, engine: str, policy: fcdp.CachePolicy, method: str) -> list[float]:
    """Losses of a step, of evaluations around an unseen write, and of a step after it."""
    run = Run(replace(SETTINGS, policy=policy), engine)
    losses = [run.step()]
    for _ in range(2):
        write(run.model, name, alone=True)
        evaluated = [next(run.data) for _ in range(2)]
        with torch.no_grad() if method == "no_grad" else torch.inference_mode():
            losses += [loss_of(run.model, batch).item() for batch in evaluated]
        losses.append(run.step())
    return losses


@pytest.mark.parametrize(
    ("name", "policy", "method"),
    [
        *((name, fcdp.HostCache(), "no_grad") for name in ("by_data", "by_collective")),
        ("by_data", fcdp.DeviceCache(), "no_grad"),
        ("by_data", fcdp.HostCache(), "inference_mode"),
    ],
    ids=str,
)
def test_an_evaluation_sees_what_was_written(
    streams: OnStreams, name: str, policy: fcdp.CachePolicy, method: str
) -> None:
    theirs, ours = (
        streams.run(4, evaluate_after, name, engine, policy, method) for engine in ("fsdp2", "fcdp")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def train_after(name: str) -> tuple[int, str]:
    """How many training passes ran after an unseen write before the error, and what it says."""
    run = Run(SETTINGS)
    for _ in range(2):
        run.step()
    write(run.model, name, alone=False)
    for passes in range(6):
        try:
            run.loss().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        except RuntimeError as error:
            return passes, str(error)
    return 6, ""


def errors_of(name: str, seed: int) -> list[tuple[int, str]]:
    from tests.fcdp import accelerator

    results, _ = accelerator.run(train_after, 4, name, seed=seed)
    return results


@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in WRITES), ("by_data", 1)])
def test_training_on_is_an_error_on_all_ranks_within_two_passes(
    apart: Pools, name: str, seed: int
) -> None:
    """Whatever the host finds of the copy of the flags: the seed draws it."""
    (found,) = apart.run(1, errors_of, name, seed)
    assert len({passes for passes, _ in found}) == 1
    for passes, text in found:
        assert 1 <= passes <= 3  # used once or twice; the next pass, or the one after, says so
        assert "blocks.1: parameters were written where nothing shows it" in text


@on_ranks(2)
def test_nothing_is_written_of_a_run_whose_last_pass_used_stale_parameters(tmp_path: Path) -> None:
    """Whatever writes it asks first, as the next pass would."""
    run = Run(Settings(2, 1))
    for write in (
        partial(fcdp.save, run.model, run.optimizer, tmp_path),
        partial(fcdp.save_adapters, run.model, tmp_path),
        partial(fcdp.export, run.model, tmp_path),
        partial(fcdp.publish, run.model, tmp_path),
    ):
        stale = mock.patch.object(Staleness, "conclude", side_effect=RuntimeError("stale"))
        with stale, pytest.raises(RuntimeError, match="^stale$"):
            write()
    assert not [*tmp_path.iterdir()]
