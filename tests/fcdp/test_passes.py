"""Passes over parts of a model: what they leave behind must not be used by the next."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import register_fsdp_forward_method

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import (
    WIDTH,
    Block,
    Settings,
    batches,
    loss_of,
    make_model,
    shard_with_fcdp,
    topology_of,
)
from tests.ranks import Pools

SETTINGS = Settings(2, 1)


def halve(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.up(x)


def by_forward(block: Block, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block(x)
    return y


def by_method(block: Block, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block.halve(x)  # type: ignore[operator]
    return y


def by_method_that_raises(block: Block, x: torch.Tensor) -> torch.Tensor:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        by_method(block, x[:, :1])
    return by_method(block, x)


def scaled_after_a_write(how: str, unseen: bool, following: int) -> bool:
    """Whether a block is what it is when gathered anew, after a part's pass and a write."""
    topology = topology_of(2, 1)
    model = make_model(SETTINGS)
    type(model.blocks[0]).halve = halve  # type: ignore[attr-defined]
    shard_with_fcdp(model, topology, SETTINGS)
    register_fsdp_forward_method(model.blocks[0], "halve")
    x = torch.ones(2, WIDTH)
    call = {"forward": by_forward, "method": by_method, "raising": by_method_that_raises}[how]
    with torch.no_grad():
        loss_of(model, next(batches(SETTINGS, topology.rank)))
        call(model.blocks[0], x)
        if how == "raising":
            with pytest.raises(RuntimeError):
                by_method(model.blocks[0], x[:, :1])
        for block in model.blocks:
            block.reshard()
        for param in model.parameters():
            (param.data if unseen else param).mul_(1.5)
        used: Block = model.blocks[following]
        seen = (by_method if how == "raising" and following == 0 else by_forward)(used, x)
        whole = Block(0)
        whole.load_state_dict(
            {name: param.full_tensor() for name, param in used.state_dict().items()}
        )
        expected = (halve if how == "raising" and following == 0 else by_forward)(whole, x)
    return torch.equal(seen, expected)


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize(("how", "following"), [("raising", 0), ("forward", 1), ("method", 1)])
def test_a_write_after_a_parts_pass_counts(
    ranks: Pools, how: str, unseen: bool, following: int
) -> None:
    """What that pass prefetched and did not use, or how it ended, does not matter."""
    assert ranks.run(2, scaled_after_a_write, how, unseen, following) == [True] * 2


def small_adapters_around_a_write(by_optimizer: bool) -> bool:
    """Whether a part's pass after a write uses it, in adapters that stay gathered after forward."""
    topology = topology_of(2, 2)
    settings = Settings(2, 2, adapter_rank=1)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    assert engine_of(model)._kept, "FCDP chose to keep them gathered"
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    x = torch.ones(2, WIDTH)
    loss_of(model, next(batches(settings, topology.rank))).backward()
    with torch.no_grad():
        before = by_forward(model.blocks[0], x)
        if by_optimizer:
            optimizer.step()
        else:
            for param in trained:
                param.mul_(1.5)
        seen = by_forward(model.blocks[0], x)
        fcdp.invalidate(model)
        engine_of(model)._kept[0].module.reshard()
        expected = by_forward(model.blocks[0], x)
    return not torch.equal(before, expected) and torch.equal(seen, expected)


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_what_stays_gathered_is_gathered_anew_after_a_pass_without_gradients(
    ranks: Pools, by_optimizer: bool
) -> None:
    """No backward lets go of it, and nothing that is gathered already is looked at."""
    assert ranks.run(4, small_adapters_around_a_write, by_optimizer) == [True] * 4
