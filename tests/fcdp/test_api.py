"""Bad input is refused with the field, the value and what is allowed; misuse is noticed."""

import copy
import gc
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fcdp
from fcdp import fsdp2
from fcdp.engine import engine_of
from tests.fcdp.training import (
    Run,
    Settings,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    shard_with_fsdp2,
    take_step,
    topology_of,
    whole,
)
from tests.ranks import on_ranks

PLAIN = Settings(2, 1)


def test_a_name_of_a_package_that_was_not_installed_says_so() -> None:
    lacking = {"fcdp.delta": None, "fcdp.delta.settings": None}
    with (
        mock.patch.dict(sys.modules, lacking),
        pytest.raises(ModuleNotFoundError, match=r"fcdp\.Delta: .* lacks the package fcdp\.delta"),
    ):
        _ = fcdp.Delta


@on_ranks(4)
def test_bad_input_is_refused() -> None:
    topology = topology_of(4, 1)

    def refused(words: str, call: Callable[..., object], *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            call(*args, **kwargs)

    cache = fcdp.cache_parameters
    refused("no module is sharded by FSDP2", cache, make_model(PLAIN), topology)
    refused("FCDP is not set up", fcdp.ledger, make_model(PLAIN))
    foreign = [nn.Linear(2, 2)]
    refused("units[0]: Linear is not a", fcdp.shard, make_model(PLAIN), topology, units=foreign)
    model = make_model(PLAIN)
    refused("units[0]: is the model itself", fcdp.shard, model, topology, units=[model])
    model = shard_with_fcdp(make_model(PLAIN), topology, PLAIN)
    twice = "set up on it already, with policy = HostCache() (now NoCache()); must be equal"
    refused(twice, cache, model, topology, fcdp.NoCache())
    ahead = "set up on it already, with look_ahead = 1 (now 2); must be equal"
    refused(ahead, cache, model, topology, cache=fcdp.CacheOptions(look_ahead=2))
    refused("set up on it already", cache, model.blocks[0], topology)
    plain = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)
    refused("is a DTensor", fcdp.shard, plain, topology, units=plain.blocks)
    elsewhere = nn.Linear(4, 4)
    fully_shard(elsewhere, mesh=topology.mesh, reshard_after_forward=2)
    refused("reshard_after_forward is an integer", cache, elsewhere, topology)


@on_ranks(2)
def test_a_step_without_the_last_micro_batch_is_an_error() -> None:
    run = Run(PLAIN)
    with fcdp.accumulate(run.model, last=False):
        run.loss().backward()
    # Another model's optimizer is none of our business, whatever its parameters look like.
    like_one = torch.ones(next(run.model.parameters()).shape)
    torch.optim.SGD([nn.Parameter(like_one)], lr=1.0).step()
    with pytest.raises(RuntimeError, match="wait to be reduced across nodes.*last=True"):
        run.optimizer.step()


@on_ranks(2)
def test_an_exception_drops_the_sums_that_wait() -> None:
    run = Run(PLAIN)
    with pytest.raises(ZeroDivisionError), fcdp.accumulate(run.model, last=False):
        run.loss().backward()
        raise ZeroDivisionError
    run.optimizer.step()
    assert fcdp.ledger(run.model).pending_bytes == 0


@on_ranks(2)
def test_the_engine_dies_with_its_model() -> None:
    run = Run(PLAIN)
    run.loss().backward()
    engine = weakref.ref(engine_of(run.model))
    del run
    gc.collect()
    assert engine() is None


@on_ranks(2)
def test_setting_up_again_with_equal_arguments_changes_nothing() -> None:
    topology = topology_of(2, 1)
    plain = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)
    assert not fcdp.is_cached(plain)
    for _ in range(2):
        fcdp.cache_parameters(plain, topology)
    assert fcdp.is_cached(plain)
    model = make_model(PLAIN)
    fcdp.shard(model, topology, units=model.blocks, policy="host")
    engine = engine_of(model)
    fcdp.shard(model, topology)  # units left out are the blocks
    fcdp.cache_parameters(model, topology)  # a trainer's callback, say
    assert engine_of(model) is engine


@on_ranks(2)
def test_copies_of_a_layer_follow_no_engine() -> None:
    """One rank alone loads its copy while a pass is under way, and asks no other rank."""
    run = Run(PLAIN)
    run.step()
    layer: Any = run.model.blocks[0].norm
    copied, before = copy.deepcopy(layer), whole(layer.weight).clone()
    loss = run.loss()
    if run.topology.rank == 1:
        copied.load_state_dict(copied.state_dict())
    take_step(loss, run.optimizer)
    assert torch.equal(whole(copied.weight), before)
    assert not torch.equal(whole(layer.weight), before)


@on_ranks(2)
def test_other_collectives_are_refused() -> None:
    """Collectives of the user's own: those from before FCDP, and those after it."""
    topology = topology_of(2, 1)
    model = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)

    class Custom(type(fsdp2.param_groups(model)[0]._all_gather_comm)):  # type: ignore[misc]
        pass

    if topology.rank == 1:
        model.blocks[0].set_custom_all_gather(Custom())
    where = "" if topology.rank == 1 else "model: rank 1: "
    with pytest.raises(ValueError, match=f"^{where}blocks.0: has a custom collective, Custom"):
        fcdp.cache_parameters(model, topology)
    model = shard_with_fcdp(make_model(PLAIN), topology, PLAIN)
    model.blocks[0].set_custom_all_gather(Custom())
    with pytest.raises(RuntimeError, match="blocks.0: set_custom_all_gather"):
        loss_of(model, next(batches(PLAIN, topology.rank)))
