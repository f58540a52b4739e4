"""How often each link is used, and the calls that change it: reshard, unshard, divide factors."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import VOCABULARY, Transformer, mlps
from tests.fcdp.upstream.running import Run, adam, cases, steps, train, train_on_tokens
from tests.ranks import Pools

LAYERS = 3


def transformer(run: Run, **options: Any) -> Transformer:
    model = Transformer(LAYERS)
    run.shard(model.units(), **options)
    return model


def loss_of(run: Run, model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(run.tokens(VOCABULARY, 2, 8, step=step)).square().mean()


def collectives(calls: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """Return a call's result, and the all-gathers and reductions of units that it asks for."""
    module = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    with (
        mock.patch(f"{module}.foreach_all_gather", wraps=groups.foreach_all_gather) as gathers,
        mock.patch(f"{module}.foreach_reduce", wraps=groups.foreach_reduce) as reductions,
    ):
        result = calls()
    return result, (gathers.call_count, reductions.call_count)


@cases((True,), (False,), (None,))
def test_units_are_gathered_and_reduced_as_often(run: Run, reshard: bool | None) -> None:
    """Forward and backward, as built with ``reshard_after_forward``."""
    model = run.set_up(Transformer(LAYERS), reshard_after_forward=reshard)
    loss, forward = collectives(lambda: loss_of(run, model))
    _, backward = collectives(loss.backward)
    assert forward == (LAYERS + 1, 0)
    assert backward == ({True: LAYERS + 1, False: 0, None: LAYERS}[reshard], LAYERS + 1)
    run.see("counts", (forward, backward))
    run.see_gradients(model)


def gathers_across_nodes(reshard: bool | None) -> tuple[int, int, int, list[int]]:
    """Gathers across nodes in forward and backward, and those from the cache in backward.

    And how often each unit is gathered again per step, as FCDP planned it.
    """
    run = Run(topology_of(2, 1), cached=True)
    model = run.set_up(Transformer(LAYERS), reshard_after_forward=reshard)
    ledger = fcdp.ledger(model)
    loss = loss_of(run, model)
    forward = ledger.misses
    loss.backward()
    reuses = [unit.reuses for unit in engine_of(model).units]
    return forward, ledger.misses - forward, ledger.hits, reuses


@pytest.mark.parametrize(
    ("reshard", "hits"), [(True, LAYERS + 1), (False, 0), (None, LAYERS)], ids=str
)
def test_backward_gathers_nothing_across_nodes(
    ranks: Pools, reshard: bool | None, hits: int
) -> None:
    *counts, reuses = ranks.run(2, gathers_across_nodes, reshard)[0]
    assert counts == [LAYERS + 1, 0, hits]
    assert reshard is None or reuses == [int(reshard)] * (LAYERS + 1)


@cases()
def test_resharding_by_hand(run: Run) -> None:
    """Built to stay gathered, resharded by hand between forward and backward."""
    model = run.set_up(Transformer(LAYERS), reshard_after_forward=False)
    for step in steps(run, model):
        loss = loss_of(run, model, step)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        run.see("backward", collectives(loss.backward))


@cases(
    (True, True, True),
    (True, False, True),
    (False, True, True),
    (False, False, True),
    (True, True, False),
    (False, True, False),
)
def test_set_reshard_after_forward(
    run: Run, reshard: bool, recurse: bool, cached_first: bool
) -> None:
    model = transformer(run, reshard_after_forward=not reshard)
    if cached_first:
        run.cache(model)
    model.set_reshard_after_forward(reshard, recurse=recurse)
    if not cached_first:
        run.cache(model)
    for step in steps(run, model):
        if step == 2:  # and back again in mid-run
            model.set_reshard_after_forward(not reshard, recurse=recurse)
        loss, forward = collectives(lambda: loss_of(run, model, step))  # noqa: B023
        run.see("forward", forward)
        run.see("backward", collectives(loss.backward))


@cases()
def test_set_reshard_after_backward(run: Run) -> None:
    """Gathered across micro-batches: the second gathers nothing."""
    model = run.set_up(Transformer(LAYERS))
    for step in steps(run, model):
        for micro in range(2):
            model.set_reshard_after_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1)
            run.see("micro", collectives(loss_of(run, model, 10 * step + micro).backward))


def force_sums(model: nn.Module) -> None:
    """Gloo knows no factor that comes before the sum."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


@cases((8.0, False, True), (2.0, False, True), (3.0, False, False), (4.0, True, True))
def test_set_gradient_divide_factor(
    run: Run, factor: float, half: bool, cached_first: bool
) -> None:
    """Gradients of the root's own group are divided by ``factor`` instead of the ranks."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    model = transformer(run, mp_policy=policy)
    force_sums(model)
    if cached_first:
        run.cache(model)
    model.set_gradient_divide_factor(factor)
    if not cached_first:
        run.cache(model)
    train_on_tokens(run, model, steps=3)


@cases()
def test_set_reduce_scatter_divide_factor(run: Run) -> None:
    model = mlps(2, 5)
    run.shard([*model, model])
    force_sums(model)
    run.cache(model)
    with pytest.deprecated_call(match="set_gradient_divide_factor"):
        model[0].set_reduce_scatter_divide_factor(5.0)
    train(run, model, adam(model), lambda step: model(run.input(4, 5, step=step)).sum(), steps=2)


SETTINGS = [
    ("set_separate_reduce_scatter_group", True),
    ("set_reduce_scatter_max_input_buffers", 3),
    ("set_reduce_scatter_unused_params", True),
    ("set_force_sum_reduction_for_comms", True),
    ("set_requires_all_reduce", False),
    ("set_keep_unsharded_storage", True),
]


@cases(*(setting for setting in SETTINGS if hasattr(FSDPModule, setting[0])))
def test_settings_that_change_no_number(run: Run, method: str, argument: Any) -> None:
    model = run.set_up(Transformer(LAYERS))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module, method)(argument)
    train_on_tokens(run, model, steps=3)


@cases()
def test_sums_are_no_longer_forced(run: Run) -> None:
    """FCDP asks for sums on the CPU; taking that back must be harmless or an error."""
    test_settings_that_change_no_number.case(run, "set_force_sum_reduction_for_comms", False)  # type: ignore[attr-defined]


@cases()
def test_set_all_reduce_hook(run: Run) -> None:
    """A hook on what is reduced, once per unit and backward."""
    model = run.set_up(Transformer(LAYERS))
    seen: list[float] = []

    def halve(reduced: torch.Tensor) -> None:
        seen.append(float(reduced.numel()))
        reduced.mul_(0.5)

    for unit in model.units():
        unit.set_all_reduce_hook(halve)  # type: ignore[operator]
    train_on_tokens(run, model, steps=3)
    run.see("hook", seen)
    assert len(seen) == 3 * (LAYERS + 1)
