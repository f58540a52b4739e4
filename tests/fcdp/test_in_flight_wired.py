"""Reductions in flight in training: who reads gradients in backward, and backwards that raise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import (
    Settings,
    TinyLM,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    shard_with_fcdp,
    topology_of,
    whole,
)
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, cases
from tests.ranks import Pools


def names_in_flight(model: nn.Module) -> list[str]:
    return [crossing.unit.name for crossing in engine_of(model)._in_flight._crossings]


def before_each_backward(model: nn.Sequential, look: Callable[[], None]) -> None:
    """Call ``look`` when the gradient of a block's output has been computed."""

    def hook(gradient: torch.Tensor) -> None:
        look()

    for block in model:
        block.register_forward_hook(lambda _, inputs, output: output.register_hook(hook) and None)


def flying(nodes: int, ranks_per_node: int) -> tuple[list[list[str]], set[type]]:
    """What is in flight when each block's backward begins, and after it; types of gradients."""
    model = mlps(5, 6)
    topology = topology_of(nodes, ranks_per_node)
    fcdp.shard(model, topology, units=model)
    seen: list[list[str]] = []
    before_each_backward(model, lambda: seen.append(names_in_flight(model)))
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    seen.append(names_in_flight(model))
    gradients: list[Any] = [param.grad for param in model.parameters()]
    return seen, {type(gradient._local_tensor) for gradient in gradients}


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (3, 1)], ids=str)
def test_two_reductions_are_in_flight_and_none_after_backward(
    ranks: Pools, shape: tuple[int, int]
) -> None:
    expected = [[], ["4"], ["4", "3"], ["3", "2"], ["2", "1"], []]
    for seen, types in ranks.run(shape[0] * shape[1], flying, *shape):
        assert seen == expected
        assert types == {torch.Tensor}


def on_one_node() -> list[list[str]]:
    return flying(1, 2)[0]


def test_nothing_is_in_flight_on_one_node(ranks: Pools) -> None:
    assert ranks.run(2, on_one_node) == [[[]] * 6] * 2


@cases(("outputs", False), ("modules", False), ("outputs", True), ("callbacks", False))
def test_hooks_may_read_gradients_in_backward(run: Run, who: str, only_rank_0: bool) -> None:
    """Every gradient that is there, when a block's backward begins or ends, or at the very end.

    As with FSDP2 on the CPU, which waits; on one rank alone too.
    """
    model = mlps(5, 6)
    run.shard([*model, model])
    run.cache(model)
    reads = run.topology.rank == 0 or not only_rank_0

    def look() -> None:
        if reads:
            for name, param in model.named_parameters():
                if param.grad is not None:
                    run.see(f"{who} {name}", param.grad)

    if who == "modules":
        for block in model:
            block.register_full_backward_hook(lambda *_: look())
    elif who == "outputs":
        before_each_backward(model, look)
    else:
        engine = torch.autograd.Variable._execution_engine
        before_each_backward(model, lambda: engine.queue_callback(look))
    for step in range(2):
        model(run.input(4, 6, step=step).requires_grad_()).sum().backward()
        run.see_gradients(model)
        model.zero_grad()


@cases()
def test_an_optimizer_in_hooks_of_modules(run: Run) -> None:
    """Each block is stepped in a hook of its own: gradients are read, written and dropped."""
    model = mlps(4, 6)
    run.shard([*model, model])
    run.cache(model)

    def step(block: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in block.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    for block in model:
        optimizer = torch.optim.AdamW(block.parameters(), lr=0.05, eps=1e-3)
        block.register_full_backward_hook(
            lambda block, *_, optimizer=optimizer: step(block, optimizer)
        )
    for number in range(3):
        loss = model(run.input(4, 6, step=number).requires_grad_()).sum()
        run.see(f"loss {number}", loss)
        loss.backward()
        run.see_gradients(model)
        model.zero_grad()
    run.see_params(model)


def types_in_hooks() -> set[type]:
    """What a hook after accumulation finds inside of the gradient that it is called for."""
    model = mlps(3, 6)
    fcdp.shard(model, topology_of(2, 1), units=model)
    found: set[type] = set()

    def hook(param: torch.Tensor) -> None:
        gradient: Any = param.grad
        found.add(type(gradient._local_tensor))

    for param in model[1].parameters():
        param.register_post_accumulate_grad_hook(hook)
    model(torch.ones(2, 6)).sum().backward()
    return found


def test_hooks_after_accumulation_find_plain_tensors(ranks: Pools) -> None:
    assert ranks.run(2, types_in_hooks) == [{torch.Tensor}] * 2


@cases((False,), (True,))
def test_gradients_that_are_there_already_are_added_to(run: Run, checkpointed: bool) -> None:
    """A backward adds to gradients of the one before, and one unit is reduced twice in each."""
    model = mlps(3, 6)
    run.shard([*model, model])
    run.cache(model)
    for step in range(2):
        x = run.input(4, 6, step=step).requires_grad_()
        if checkpointed:
            for block in [*model, model[0]]:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        else:
            x = model[0](model(x))
        x.sum().backward()
        run.see_gradients(model)


def raise_in_backward(model: TinyLM) -> Callable[[], None]:
    """Raise before the first block's backward, when the second's reduction is under way."""

    def hook(module: nn.Module, gradients: object) -> None:
        raise ValueError("no label")

    return model.blocks[0].register_full_backward_pre_hook(hook).remove


def after_an_error(settings: Settings, then: str) -> tuple[list[list[str]], bool]:
    """What is in flight after a backward that raised, and after what is done about it; and whether
    training goes on as if it had not been."""
    finals = []
    flights: list[list[str]] = []
    for raises in (False, True):
        model = shard_with_fcdp(
            make_model(settings), topology_of(settings.nodes, settings.ranks_per_node), settings
        )
        assert isinstance(model, FSDPModule)
        optimizer = make_optimizer(model, settings)
        data = batches(settings, topology_of(settings.nodes, settings.ranks_per_node).rank)
        for step in range(3):
            tokens = next(data)
            if raises and step == 1:
                mend = raise_in_backward(model)
                with pytest.raises(ValueError, match="no label"):
                    loss_of(model, tokens).backward()
                mend()
                flights.append(names_in_flight(model))
                model.reset_iter_state()
                fcdp.discard(model)
                if then == "read":
                    torch.nn.utils.get_total_norm(
                        [p.grad for p in model.parameters() if p.grad is not None]
                    )
                elif then == "step":
                    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
                    frozen.step()
                optimizer.zero_grad()
                if then == "forward":
                    with torch.no_grad():
                        loss_of(model, tokens)
                flights.append(names_in_flight(model))
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append([whole(param).detach() for param in model.parameters()])
    equal = all(torch.equal(plain, other) for plain, other in zip(*finals, strict=True))
    return flights, equal


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("then", ["forward", "read", "step"])
def test_a_backward_that_raised_leaves_nothing_in_flight_for_the_next(
    ranks: Pools, shape: tuple[int, int], then: str
) -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has no reset_iter_state")
    settings = replace(Settings(), nodes=shape[0], ranks_per_node=shape[1])
    for flights, equal in ranks.run(settings.world_size, after_an_error, settings, then):
        assert flights == [["blocks.1"], []]
        assert equal
