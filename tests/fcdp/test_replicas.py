"""Adapters that every rank keeps whole train like sharded ones, for one exchange a step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from fcdp.replicas import Replicas
from tests.fcdp.training import (
    Settings,
    batches,
    loss_of,
    make_model,
    make_optimizer,
    shard_with_fcdp,
    take_step,
    topology_of,
    train,
)
from tests.ranks import Pools

SETTINGS = Settings(2, 2, adapter_rank=3, adapters="replicated")


def test_they_train_as_with_fsdp2(ranks: Pools) -> None:
    """Beside the product's: clipped, and with 80 elements, which three ranks share unevenly."""
    settings = replace(SETTINGS, nodes=3, ranks_per_node=1, adapter_rank=1, clip=0.1)
    expected = ranks.run(settings.world_size, train, settings, "fsdp2")
    actual = ranks.run(settings.world_size, train, settings, "fcdp")
    for mine, other in zip(actual, expected, strict=True):
        for field in ("losses", "norms", "params"):
            torch.testing.assert_close(
                getattr(mine, field), getattr(other, field), rtol=1e-6, atol=1e-6
            )
        assert len(set(other.losses)) > 1, "the reference did not train"


def test_a_step_sends_what_sharded_adapters_send(ranks: Pools) -> None:
    """2·(n−1)/n of them across nodes, in the reduction alone, however many micro-batches."""
    settings = replace(SETTINGS, accumulation=4, steps=2)
    result = ranks.run(4, train, settings, "fcdp")[0]
    adapters = sum(p.numel() for p in make_model(settings).parameters() if p.requires_grad)
    filled_up = -(-adapters // 4) * 4
    assert result.ledger is not None
    node = settings.ranks_per_node * result.ledger["inter_node"]["reduce"] / settings.steps
    assert node == 2 * 1 / 2 * 4 * filled_up
    # What is frozen crosses in the first forward, and nothing else is gathered ever again.
    frozen = ranks.run(4, train, replace(settings, steps=1), "fcdp")[0]
    assert result.ledger["inter_node"]["forward"] == frozen.ledger["inter_node"]["forward"]


def step_too_early() -> tuple[str, bool]:
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, ranks_per_node=1)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    optimizer = make_optimizer(model, settings)
    data = batches(settings, topology.rank)
    with fcdp.accumulate(model, last=False):
        loss_of(model, next(data)).backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    with pytest.raises(KeyError), fcdp.accumulate(model, last=False):
        raise KeyError
    nothing_left = all(param.grad is None for param in engine_of(model)._replicas.params)
    return str(error.value), nothing_left


def test_sums_that_wait_stop_the_optimizer_and_go_with_a_failure(ranks: Pools) -> None:
    for message, nothing_left in ranks.run(2, step_too_early):
        assert "gradients wait to be reduced across nodes" in message
        assert nothing_left


def backward_after_a_failed_one() -> list[float]:
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, ranks_per_node=1)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    data = batches(settings, topology.rank)

    def fail(*_: object) -> None:
        raise KeyError

    loss = loss_of(model, next(data))
    # The adapters of the last block have their gradients by then, the others have not.
    handle = model.blocks[0].first.down.weight.register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward()
    handle.remove()
    model.zero_grad()
    loss_of(model, next(data)).backward()
    return [p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None]


def test_a_failed_backward_does_not_keep_the_next_from_reducing(ranks: Pools) -> None:
    one, other = ranks.run(2, backward_after_a_failed_one)
    assert len(one) == 8
    assert one == other


def refusals() -> list[str]:
    topology = topology_of(2, 1)
    messages = []
    for settings in (
        Settings(2, 1, adapters="replicated"),
        Settings(2, 1, adapter_rank=3, adapters="whole"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="adapters = ") as error:
            shard_with_fcdp(make_model(settings), topology, settings)
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_is_refused(ranks: Pools) -> None:
    for nothing_apart, unknown in ranks.run(2, refusals):
        assert "freeze the base model first" in nothing_apart
        assert "must be one of sharded, replicated" in unknown


def spread_after_training_by_a_method() -> float:
    """How far this rank is from rank 0 after two steps, where each began with its own values."""
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, nodes=2, ranks_per_node=1)
    model = make_model(settings)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param += topology.rank
    shard_with_fcdp(model, topology, settings)
    type(model).encode = lambda self, tokens: loss_of(type(self).forward.__get__(self), tokens)  # type: ignore[attr-defined]
    register_fsdp_forward_method(model, "encode")
    optimizer = make_optimizer(model, settings)
    tokens = next(batches(settings, topology.rank))
    for _ in range(2):
        take_step(model.encode(tokens), optimizer)  # type: ignore[operator]
    mine = model.blocks[0].first.up.weight.detach()
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    return float((mine - theirs).abs().max())


def test_a_registered_forward_method_makes_them_equal(ranks: Pools) -> None:
    assert ranks.run(2, spread_after_training_by_a_method) == [0.0, 0.0]


def gradient_of_several_backwards(adapters: Literal["sharded", "replicated"]) -> torch.Tensor:
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, nodes=2, ranks_per_node=1, adapters=adapters)
    model = make_model(settings)
    shard_with_fcdp(model, topology, settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    for _, tokens in zip(range(3), batches(settings, topology.rank), strict=False):
        loss_of(model, tokens).backward()
    grad = model.blocks[0].first.up.weight.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def test_a_divide_factor_counts_once_however_many_backwards(ranks: Pools) -> None:
    replicated = ranks.run(2, gradient_of_several_backwards, "replicated")
    sharded = ranks.run(2, gradient_of_several_backwards, "sharded")
    torch.testing.assert_close(replicated, sharded)


def test_gradients_of_several_dtypes_are_averaged_in_the_widest() -> None:
    params = [nn.Parameter(torch.ones(3, dtype=each)) for each in (torch.bfloat16, torch.float32)]
    for param in params:
        param.grad = torch.full_like(param, 1 / 3)
    replicas: Any = SimpleNamespace(_reduce_dtype=None, _topology=SimpleNamespace(world_size=4))
    buffer = Replicas._gather_up(replicas, params)
    narrow, wide = (each.grad.float().tolist() for each in params if each.grad is not None)
    assert (buffer.dtype, buffer.tolist()) == (torch.float32, [*narrow, *wide, 0.0, 0.0])


def losses_with_a_block_left_out(adapters: Literal["sharded", "replicated"]) -> list[float]:
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, nodes=2, ranks_per_node=1, adapters=adapters)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    optimizer = make_optimizer(model, settings)
    blocks, losses = model.blocks, []
    for step, tokens in zip(range(5), batches(settings, topology.rank), strict=False):
        if step > 0:  # FSDP2 looks around once
            model.blocks = nn.ModuleList([blocks[step % 2]])
        losses.append(take_step(loss_of(model, tokens), optimizer))
    return losses


def test_a_block_may_be_left_out(ranks: Pools) -> None:
    replicated = ranks.run(2, losses_with_a_block_left_out, "replicated")
    sharded = ranks.run(2, losses_with_a_block_left_out, "sharded")
    for got, expected in zip(replicated, sharded, strict=True):
        assert got == pytest.approx(expected, rel=1e-6)


def assigned() -> str:
    topology = topology_of(2, 1)
    settings = replace(SETTINGS, nodes=2, ranks_per_node=1)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(RuntimeError) as error:
        loss_of(model, next(batches(settings, topology.rank)))
    return str(error.value)


def test_other_parameters_in_their_place_are_refused(ranks: Pools) -> None:
    assert all("load without assign" in message for message in ranks.run(2, assigned))
