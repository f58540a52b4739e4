"""Explicit prefetching: lists of modules, ``unshard`` by hand, events, and what is skipped."""

import copy
import itertools
from typing import Any, cast

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

import fcdp
from fcdp.engine import engine_of
from fcdp.fsdp2 import prefetched
from tests.fcdp.releases import since_2_13
from tests.fcdp.training import topology_of, update
from tests.fcdp.upstream.models import Transformer, mlps
from tests.fcdp.upstream.running import (
    Run,
    adam,
    all_sharded,
    cases,
    train,
    train_on,
    train_on_tokens,
)
from tests.ranks import on_ranks


@cases((2, True, False), (1, True, False), (4, True, False), (2, True, True), (2, False, False))
def test_modules_to_prefetch(run: Run, ahead: int, reshard: bool, checkpointing: bool) -> None:
    """Each layer prefetches the next ones in forward and the former ones in backward."""
    model = Transformer(4, checkpointing=checkpointing)
    run.shard(model.units(), reshard_after_forward=reshard)
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(index - ahead, 0) : index][::-1])
    run.cache(model)
    train_on_tokens(run, model)


@pytest.mark.parametrize("own", [False, True])
@on_ranks(2)
def test_what_a_user_prefetches_stays(own: bool) -> None:
    """Set after ``fcdp.shard`` and before the first forward: gathers begun when a layer ends."""
    topology, model = topology_of(2, 1), cast(Any, mlps(5, 6))
    fcdp.shard(model, topology, units=[*model])
    groups = [unit.group for unit in engine_of(model).units]
    if own:
        model.set_modules_to_forward_prefetch([])
        model[0].set_modules_to_forward_prefetch([model[3]])
    begun: list[int] = []

    def look(*_: object) -> None:
        begun.extend(at for at, group in enumerate(groups) if prefetched(group) is not None)

    model[0].register_forward_hook(look)
    model(torch.ones(1, 6)).sum().backward()
    ahead = [1, 2] if topology.mesh.device_type == "cpu" else []
    assert begun == ([3] if own else ahead)


@cases()
def test_prefetching_is_changed_in_mid_run(run: Run) -> None:
    """Set after FCDP, and changed in mid-run."""
    model = run.set_up(mlps(4, 6))

    def loss(step: int) -> torch.Tensor:
        for here, there in itertools.pairwise(model):
            here.set_modules_to_forward_prefetch([there] if step % 2 == 0 else [])
            there.set_modules_to_backward_prefetch([here] if step % 2 else [])
        return model(run.input(4, 6, step=step)).sum()

    train(run, model, adam(model), loss)


class Branches(nn.Module):
    """Gathers all its parts before it uses any, as a model with concurrent branches may."""

    def __init__(self, *, async_op: bool) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.async_op = async_op
        self.handles: list[UnshardHandle | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.handles = [
            part.unshard(async_op=self.async_op)
            for part in self.parts
            if isinstance(part, FSDPModule)
        ]
        for handle in self.handles:
            if handle is not None:
                handle.wait()
        return torch.stack([part(x) for part in self.parts]).sum(0)


@cases((True, True), (False, True), (True, False))
def test_unshard_within_forward(run: Run, async_op: bool, reshard: bool) -> None:
    model = Branches(async_op=async_op)
    run.set_up(model, [*model.parts, model], reshard_after_forward=reshard)
    train_on(run, model, 3, 6)
    assert all(isinstance(handle, UnshardHandle) == async_op for handle in model.handles)


@cases((True,), (False,))
def test_unshard_before_forward(run: Run, async_op: bool) -> None:
    """The first layers are gathered while the batch is fetched, before the model's forward."""
    model = run.set_up(mlps(3, 6))

    def loss(step: int) -> torch.Tensor:
        for layer in model[:2]:
            layer.unshard(async_op=async_op)
        return model(run.input(4, 6, step=step)).sum()

    train(run, model, adam(model), loss)


@cases()
def test_unshard_before_the_first_forward(run: Run) -> None:
    model = mlps(2, 6)
    reference = copy.deepcopy(model)
    run.set_up(model)
    for layer, reference_layer in zip(model, reference, strict=True):
        layer.unshard()
        for param, value in zip(layer.parameters(), reference_layer.parameters(), strict=True):
            assert torch.equal(param, value)
            run.see("gathered", param)
        layer.reshard()
    assert all_sharded(model)


@cases()
def test_a_prefetch_of_the_wrong_module(run: Run) -> None:
    """A layer is prefetched in backward, and again, where nothing needs it."""
    model = mlps(3, 6)
    run.shard([*model, model])
    model[1].set_modules_to_backward_prefetch([model[2]])
    model[0].set_modules_to_forward_prefetch([model[2]])
    run.cache(model)
    train_on(run, model, 4, 6)


@cases()
def test_set_post_optim_event(run: Run) -> None:
    """The gathers wait for an event of the caller's; on the CPU a stand-in."""
    model = run.set_up(mlps(3, 6))

    def tell(*_: object) -> None:
        model.set_post_optim_event(torch.Event("cpu"))

    optimizer = adam(model)
    optimizer.register_step_post_hook(tell)
    train(run, model, optimizer, lambda step: model(run.input(4, 6, step=step)).sum())


@cases()
def test_set_unshard_in_backward(run: Run) -> None:
    """An embedding needs no weight in backward."""
    model = Transformer(2)
    run.shard([model.embedding, *model.units()])
    model.embedding.set_unshard_in_backward(False)
    run.cache(model)
    train_on_tokens(run, model)


@since_2_13
@cases()
def test_reset_iter_state_after_an_exception(run: Run) -> None:
    model = run.set_up(mlps(3, 6))
    armed = [False]

    def explode(*_: object) -> None:
        if armed[0]:
            raise ZeroDivisionError

    model[1].in_proj.register_forward_pre_hook(explode)
    optimizer = adam(model)
    for step in range(4):
        armed[0] = step == 2
        if armed[0]:
            with pytest.raises(ZeroDivisionError):
                model(run.input(4, 6, step=step))
            model.reset_iter_state()
            continue
        loss = model(run.input(4, 6, step=step)).sum()
        run.see(f"loss {step}", loss)
        update(loss, optimizer)
    run.see_params(model)
