"""Micro-batches of a step: what is given up does not leak, what some of them use is summed."""

import contextlib
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn

import fcdp
from fcdp.grouping import PartialsChoice
from tests.fcdp import training
from tests.fcdp.training import Settings, topology_of
from tests.fcdp.upstream.models import Branches
from tests.fcdp.upstream.running import PAIR, Run, cases
from tests.ranks import Pools, on_ranks


def micro_batch(run: Run, model: nn.Module, used: str, *, last: bool) -> None:
    """Run one micro-batch; its gradients are whole numbers, whose sums have no order."""
    x = torch.full((1, 4), 1.0 + run.topology.rank)
    with fcdp.accumulate(model, last=last) if run.cached else contextlib.nullcontext():
        model(x, used=used).sum().backward()


#: Places of the sums; ``each``: none.
PLACES: list[PartialsChoice] = ["device", "host", "each"]


def branches(run: Run, place: PartialsChoice = "auto", *, own_units: bool = True) -> Branches:
    run.comm = fcdp.CommOptions(partial_gradients=place)
    model = Branches(4)
    return run.set_up(model, None if own_units else [model])


L, R, BOTH = "left", "right", "left right"


@cases(
    *product(
        ["none", "zero", "foreach, zero", "detached", "foreach, discard", "none, plain backward"],
        (False, True),
        ("device", "each"),
    ),
    ("foreach, zero, plain backward", True, "device"),
    ("foreach, zero", True, "host"),
    shapes=[PAIR],
)
def test_micro_batches_of_a_step_that_was_given_up_do_not_leak(
    run: Run, how: str, ahead: bool, place: PartialsChoice
) -> None:
    """``ahead``: gradients that have crossed nodes already were there when they began."""
    model = branches(run, place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach="foreach" in how)
    if ahead:
        model(torch.ones(1, 4), used=BOTH).sum().backward()
    for _ in range(2):
        micro_batch(run, model, BOTH, last=False)
    if "discard" in how:
        optimizer.zero_grad(set_to_none=False)
        if run.cached:
            fcdp.discard(model)
        optimizer.zero_grad()
    elif how == "detached":
        for param in model.parameters():
            param.grad.detach().zero_()  # type: ignore[union-attr]
    else:
        optimizer.zero_grad(set_to_none="none" in how)
    if "zero" in how:
        run.see_gradients(model)
    if "plain" in how:
        model(torch.ones(1, 4), used=BOTH).sum().backward()
    else:
        for last in (False, True):
            micro_batch(run, model, BOTH, last=last)
    run.see_gradients(model)


@cases((True,), (False,), shapes=[PAIR])
def test_a_gradient_that_waits_cannot_be_read(run: Run, ahead: bool) -> None:
    """Nor do attempts change the step's gradients."""
    model = branches(run)
    if ahead:
        model(torch.ones(1, 4), used=BOTH).sum().backward()
    for place in range(3):
        micro_batch(run, model, BOTH, last=place == 2)
        if run.cached and place < 2:
            _refuse_reads([*model.parameters()])
    run.see_gradients(model)


def _refuse_reads(params: list[Any]) -> None:
    some = torch.zeros_like(params[0])
    for read in (
        lambda: params[0].grad.full_tensor(),
        lambda: params[0].grad.to_local().sum(),
        lambda: params[0].grad.norm(),
        lambda: params[0].grad.div_(2),
        lambda: some.add_(params[0].grad),
        lambda: torch._foreach_mul_([param.grad for param in params], 0.5),
        lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
    ):
        with pytest.raises(RuntimeError, match="not known before it has crossed nodes"):
            read()
    assert "Waiting" in repr(params[0].grad)


#: The layers that each micro-batch of each step uses.
USED = [
    *([[L, L]], [[BOTH, L]], [[BOTH, L, R, BOTH]], [[BOTH, R], [L, L], [BOTH]]),
    *([[L, R]], [[R, L, BOTH], [L, BOTH, R], [R]]),
]


@cases(*product(USED, (True, False), PLACES), shapes=[PAIR])
def test_what_only_some_micro_batches_use_is_reduced_with_the_last(
    run: Run, steps: list[list[str]], own_units: bool, place: PartialsChoice
) -> None:
    """A parameter that none uses has no gradient, as with FSDP2: no optimizer moves it."""
    model = branches(run, place, own_units=own_units)
    for micro_batches in steps:
        for place, used in enumerate(micro_batches):
            micro_batch(run, model, used, last=place == len(micro_batches) - 1)
        run.see_gradients(model)
        model.zero_grad()


@cases(("each",), shapes=[PAIR])
def test_a_gradient_that_crosses_with_each_micro_batch_can_be_read_after_it(
    run: Run, place: PartialsChoice
) -> None:
    model = branches(run, place)
    for at in range(3):
        micro_batch(run, model, BOTH, last=at == 2)
        run.see_gradients(model)


def crossings(place: PartialsChoice) -> tuple[int, int, int]:
    """Bytes between nodes that a step of three micro-batches gathers, and reduces; and of sums."""
    settings = Settings(ranks_per_node=1, partial_gradients=place, reshard_after_forward=True)
    run = training.Run(settings)
    for at in range(3):
        with fcdp.accumulate(run.model, last=at == 2):
            run.loss().backward()
    counts = fcdp.ledger(run.model)
    sent = counts.snapshot()["inter_node"]
    held = max(counts.peak_pending_bytes, counts.host_partials_bytes)
    return sum(sent.values()) - sent["reduce"], sent["reduce"], held


def test_each_reduces_every_micro_batch_and_gathers_once(ranks: Pools) -> None:
    """ZeRO-3's 3·k crossings become 1 + k; with sums they become two."""
    (gathered, reduced, held), _ = ranks.run(2, crossings, "device")
    assert held > 0
    for place in ("auto", "host"):
        assert ranks.run(2, crossings, place)[0][:2] == (gathered, reduced)
    assert ranks.run(2, crossings, "each")[0] == (gathered, 3 * reduced, 0)


@pytest.mark.parametrize("own_units", [True, False])
@on_ranks(2)
def test_zero_grad_within_a_micro_batch_gives_up_what_it_does_before_one(own_units: bool) -> None:
    """As with FSDP2, what only the step before used has no gradient, which momentum would use."""
    run = Run(topology_of(2, 1), cached=True)
    model = branches(run, own_units=own_units)
    micro_batch(run, model, BOTH, last=False)
    for last in (False, True):
        with fcdp.accumulate(model, last=last):
            if not last:
                model.zero_grad()
            model(torch.ones(1, 4), used=L).sum().backward()
    assert [param.grad is not None for param in model.parameters()] == [True, True, False, False]


@on_ranks(2)
def test_a_micro_batch_inside_of_another_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fcdp.shard(model, topology_of(2, 1), units=[*model])
    for last in (False, True):
        with fcdp.accumulate(model, last=last):
            with (
                pytest.raises(RuntimeError, match="called inside of fcdp.accumulate"),
                fcdp.accumulate(model, last=True),
            ):
                pass
            model(torch.ones(1, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
