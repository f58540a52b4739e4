"""Bad input is refused with the field, the value and what is allowed; misuse is noticed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import (
    Run,
    Settings,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    shard_with_fsdp2,
    topology_of,
)
from tests.ranks import Pools

PLAIN = Settings(2, 1)


def refusals() -> dict[str, str]:
    """Error messages by case."""
    topology = topology_of(4, 1)
    messages: dict[str, str] = {}

    def refused(case: str, call: object, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is the test
            call(*args, **kwargs)  # type: ignore[operator]
        messages[case] = str(error.value)

    refused("not_sharded", fcdp.cache_parameters, make_model(PLAIN), topology)
    refused("no_engine", fcdp.ledger, make_model(PLAIN))
    refused("foreign_unit", fcdp.shard, make_model(PLAIN), topology, units=[nn.Linear(2, 2)])
    model = make_model(PLAIN)
    refused("model_as_unit", fcdp.shard, model, topology, units=[model])
    model = shard_with_fcdp(make_model(PLAIN), topology, PLAIN)
    refused("twice", fcdp.cache_parameters, model, topology, fcdp.NoCache())
    plain = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)
    refused("sharded_already", fcdp.shard, plain, topology, units=plain.blocks)
    hybrid = nn.Linear(4, 4)
    fully_shard(hybrid, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    refused("hybrid", fcdp.cache_parameters, hybrid, topology)
    elsewhere = nn.Linear(4, 4)
    fully_shard(elsewhere, mesh=topology.mesh, reshard_after_forward=2)
    refused("reshard_integer", fcdp.cache_parameters, elsewhere, topology)
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(
        distribute_tensor(parallel.weight.detach(), topology.mesh, [Shard(0)])
    )
    refused("tensor_parallel", fcdp.shard, nn.Sequential(parallel), topology, units=[])
    return messages


def test_bad_input_is_refused(ranks: Pools) -> None:
    messages = ranks.run(4, refusals)[0]
    for case, words in {
        "not_sharded": "no module is sharded by FSDP2",
        "no_engine": "FCDP is not set up",
        "foreign_unit": "units[0]: Linear is not a submodule",
        "model_as_unit": "units[0]: is the model itself",
        "twice": "set up on it already, with policy = HostCache() (now NoCache()); must be equal",
        "sharded_already": "is a DTensor",
        "hybrid": "2 dimensions ('a', 'b')",
        "reshard_integer": "reshard_after_forward is an integer",
        "tensor_parallel": "0.weight: is a DTensor",
    }.items():
        assert words in messages[case], (case, messages[case])


def step_too_early() -> str:
    run = Run(PLAIN)
    with fcdp.accumulate(run.model, last=False):
        run.loss().backward()
    # Another model's optimizer is none of our business, whatever its parameters look like.
    like_one = torch.ones(next(run.model.parameters()).shape)
    torch.optim.SGD([nn.Parameter(like_one)], lr=1.0).step()
    with pytest.raises(RuntimeError, match="last=True") as error:
        run.optimizer.step()
    return str(error.value)


def test_a_step_without_the_last_micro_batch_is_an_error(ranks: Pools) -> None:
    assert "wait to be reduced across nodes" in ranks.run(2, step_too_early)[0]


def fail_in_mid_accumulation() -> int:
    run = Run(PLAIN)
    with pytest.raises(ZeroDivisionError), fcdp.accumulate(run.model, last=False):
        run.loss().backward()
        raise ZeroDivisionError
    run.optimizer.step()
    return fcdp.ledger(run.model).pending_bytes


def test_an_exception_drops_the_sums_that_wait(ranks: Pools) -> None:
    assert ranks.run(2, fail_in_mid_accumulation) == [0, 0]


def collected() -> bool:
    run = Run(PLAIN)
    run.loss().backward()
    engine = weakref.ref(engine_of(run.model))
    del run
    gc.collect()
    return engine() is None


def test_the_engine_dies_with_its_model(ranks: Pools) -> None:
    assert all(ranks.run(2, collected))


def set_up_again() -> tuple[bool, bool, bool]:
    """Whether FCDP is on a model before, after, and as it was after the same call again."""
    topology = topology_of(2, 1)
    plain = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)
    before = fcdp.is_cached(plain)
    for _ in range(2):
        fcdp.cache_parameters(plain, topology)
    model = make_model(PLAIN)
    fcdp.shard(model, topology, units=model.blocks)
    engine = engine_of(model)
    fcdp.shard(model, topology, units=model.blocks)
    fcdp.cache_parameters(model, topology)  # a trainer's callback, say
    return before, fcdp.is_cached(plain), engine_of(model) is engine


def test_setting_up_again_with_equal_arguments_changes_nothing(ranks: Pools) -> None:
    assert ranks.run(2, set_up_again) == [(False, True, True)] * 2


def foreign_collectives() -> tuple[str, str]:
    """What is said of a custom collective before FCDP, and of one after it."""
    topology = topology_of(2, 1)
    model = shard_with_fsdp2(make_model(PLAIN), topology, PLAIN)

    class Custom(type(model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm)):  # type: ignore[misc]
        pass

    model.blocks[0].set_custom_all_gather(Custom())
    with pytest.raises(ValueError) as early:  # noqa: PT011 - the message is the test
        fcdp.cache_parameters(model, topology)
    model = shard_with_fcdp(make_model(PLAIN), topology, PLAIN)
    model.blocks[0].set_custom_all_gather(Custom())
    with pytest.raises(RuntimeError) as late:
        loss_of(model, next(batches(PLAIN, topology.rank)))
    return str(early.value), str(late.value)


def test_other_collectives_are_refused(ranks: Pools) -> None:
    for early, late in ranks.run(2, foreign_collectives):
        assert "blocks.0: has a custom collective, Custom" in early
        assert "blocks.0: set_custom_all_gather" in late
