"""Differences on the accelerator of tests: what a step waits for, exchanges and takes."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch

import fcdp
from fcdp.delta.on_device import Told
from tests.fcdp import training
from tests.fcdp.training import Settings
from tests.ranks import Pools

RAW = Settings(steps=8, optimizer="sgd", param_dtype=torch.bfloat16, detect_writes=False)


class Step(NamedTuple):
    """What one rank did in one step."""

    #: The functions of the library in which the host waited for the device.
    waits: list[str]
    sent: int
    reserved: int
    params: dict[str, torch.Tensor]


def run_steps(codec: fcdp.Delta | None) -> list[Step]:
    from tests.fcdp.accelerator import here

    run = training.Run(replace(RAW, gather_codec=codec))
    model, device = run.model, here()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(RAW.steps):
        batch = next(run.data)
        fcdp.ledger(model).reset()
        waits: list[str] = []
        wait_for = device.host.wait_for

        def noted(clock: Any) -> None:
            who = traceback.extract_stack()[-2]
            if who.name == "synchronize":  # else the tape's own, or for another host
                waits.append(traceback.extract_stack()[-3].name)  # noqa: B023
            wait_for(clock)  # noqa: B023

        with mock.patch.object(device.host, "wait_for", noted):
            # A part of the model before the others, which then need no sizes any more.
            with torch.no_grad():
                model.blocks[0](torch.ones(1, 12)) if found else model(batch)
            training.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent = fcdp.ledger(model).bytes["inter_node"]["forward"]
        params = {
            name: param.to_local().detach().cpu().clone()  # type: ignore[attr-defined]
            for name, param in model.named_parameters()
        }
        found.append(Step(waits, sent, device.reserved_bytes, params))
    return found


def both(codec: fcdp.Delta) -> tuple[list[list[Step]], list[list[Step]], int, str | None]:
    from tests.fcdp import accelerator

    plain, before = accelerator.run(run_steps, 4, None)
    told, after = accelerator.run(run_steps, 4, codec)
    gathers = [
        sum(
            each.what.startswith("all-gather") and not each.what.endswith("send")
            for each in tape.operations
        )
        for tape in (after, before)
    ]
    return plain, told, gathers[0] - gathers[1], accelerator.check(after, range(4))


def test_a_step_is_bit_for_bit_as_without_and_waits_once(apart: Pools) -> None:
    ((plain, told, more, wrong),) = apart.run(1, both, fcdp.Delta())
    assert wrong is None, wrong
    assert more == 4 * (RAW.steps - 1)  # of all sizes
    for mine, theirs in zip(told, plain, strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            for name, param in other.params.items():
                assert torch.equal(one.params[name], param), (number, name)
            assert (one.sent < other.sent) == (number > 0)
            assert other.waits == []
            assert one.waits == ["learn"] * (number > 0)
        assert mine[-1].reserved == mine[3].reserved  # nothing is taken as time goes on


def after_damage() -> list[str]:
    """What a rank says, and when, of a message that was damaged at the second step."""
    run, said = training.Run(replace(RAW, gather_codec=fcdp.Delta())), []
    optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-3)
    for step in range(4):
        try:
            run.loss().backward()
        except RuntimeError as error:
            said.append(f"step {step}: {error}")
        optimizer.step()
        optimizer.zero_grad()
    return said


def damaged() -> list[list[str]]:
    from tests.fcdp import accelerator

    write, written = Told.write, []

    def once(self: Told, new: torch.Tensor, base: torch.Tensor, node: int) -> torch.Tensor:
        message = write(self, new, base, node)
        if node == 0 and accelerator.here().rank not in written:
            written.append(accelerator.here().rank)
            message[0] ^= 1
        return message

    with mock.patch.object(Told, "write", once):
        results, _ = accelerator.run(after_damage, 4)
    return list(results)


def test_damage_is_told_at_the_next_step(apart: Pools) -> None:
    (results,) = apart.run(1, damaged)
    for (said,) in results:
        assert said.startswith("step 2: a difference between versions of a shard led"), said
