"""Reductions in flight in training: who reads gradients in backward, and backwards that raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, cases
from tests.ranks import Pools, on_ranks


def names_in_flight(model: nn.Module) -> list[str]:
    return [crossing.unit.name for crossing in engine_of(model)._in_flight._crossings]


def before_each_backward(model: nn.Sequential, look: Callable[[], None]) -> None:
    """Call ``look`` when the gradient of a block's output has been computed."""

    def hook(gradient: torch.Tensor) -> None:
        look()

    for block in model:
        block.register_forward_hook(lambda _, inputs, output: output.register_hook(hook) and None)


def flying(
    nodes: int, ranks_per_node: int, dtype: torch.dtype
) -> tuple[list[list[str]], set[type]]:
    """What is in flight when each block's backward begins, and after it; types of gradients."""
    model = mlps(5, 6)
    topology = topology_of(nodes, ranks_per_node)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    fcdp.shard(model, topology, units=model, mp_policy=policy)
    seen: list[list[str]] = []
    before_each_backward(model, lambda: seen.append(names_in_flight(model)))
    model(torch.ones(2, 6, requires_grad=True)).sum().backward()
    seen.append(names_in_flight(model))
    gradients: list[Any] = [param.grad for param in model.parameters()]
    return seen, {type(gradient._local_tensor) for gradient in gradients}


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 2), torch.float32), ((3, 1), torch.bfloat16)], ids=str
)
def test_two_reductions_are_in_flight_and_none_after_backward(
    ranks: Pools, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Also where FSDP2 casts what was reduced to the parameters' dtype."""
    expected = [[], ["4"], ["4", "3"], ["3", "2"], ["2", "1"], []]
    for seen, types in ranks.run(shape[0] * shape[1], flying, *shape, dtype):
        assert seen == expected
        assert types == {torch.Tensor}


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


@on_ranks(2)
def test_hooks_after_accumulation_find_plain_tensors() -> None:
    """Inside of the gradient that each is called for."""
    model = mlps(3, 6)
    fcdp.shard(model, topology_of(2, 1), units=model)
    found: set[type] = set()

    def hook(param: torch.Tensor) -> None:
        gradient: Any = param.grad
        found.add(type(gradient._local_tensor))

    for param in model[1].parameters():
        param.register_post_accumulate_grad_hook(hook)
    model(torch.ones(2, 6)).sum().backward()
    assert found == {torch.Tensor}
