"""Training with differences: bit for bit as without, in fewer bytes, and whole where it must be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.training import (
    Result,
    Settings,
    batches,
    make_model,
    shard_with_fcdp,
    topology_of,
    train,
)
from tests.ranks import Pools

#: Others are drawn by the walks, half of which tell differences.
CASES: dict[str, tuple[Any, Settings]] = {
    "bf16": ("always", Settings(steps=8, param_dtype=torch.bfloat16)),
    "fp16": ("always", Settings(steps=4, param_dtype=torch.float16)),
    "events": (
        "smallest",
        Settings(
            steps=9,
            param_dtype=torch.bfloat16,
            events={1: "eval", 2: "write", 3: "load", 5: "write_one_rank", 6: "freeze"},
        ),
    ),
}


def equal(actual: Result, expected: Result) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    for name, param in expected.params.items():
        assert torch.equal(actual.params[name], param), name


@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_for_bit_as_without(ranks: Pools, name: str) -> None:
    when, raw = CASES[name]
    with_differences = replace(raw, gather_codec=fcdp.Delta(when))
    expected = ranks.run(raw.world_size, train, raw, "fcdp")
    actual = ranks.run(raw.world_size, train, with_differences, "fcdp")
    for one, other in zip(actual, expected, strict=True):
        equal(one, other)


@dataclass(frozen=True)
class Step:
    """What one rank did in one step."""

    inter_node: int
    gathered: dict[str, torch.Tensor]


UPDATES: dict[str, Any] = {
    "nothing": lambda shard: None,
    "one unit in the last place": lambda shard: shard.mul_(1 + 2**-8),
    "signs": lambda shard: shard.neg_(),
    "negative zeros": lambda shard: shard.fill_(-0.0),
    "infinities": lambda shard: shard.div_(0.0),
    "payloads of NaN": lambda shard: shard.view(torch.int32).random_(0x7F800001, 0x7FFFFFFF),
    "denormals": lambda shard: shard.uniform_(-1e-39, 1e-39),
    "all others": lambda shard: shard.normal_(),
}


def _sent(model: torch.nn.Module) -> int:
    return int(sum(fcdp.ledger(model).snapshot().get("inter_node", {}).values()))


def write_and_gather(settings: Settings) -> list[Step]:
    """Write shards in place, in every manner, and look at what is gathered afterwards."""
    topology = topology_of(settings.nodes, settings.ranks_per_node)
    model = shard_with_fcdp(make_model(settings), topology, settings)
    found = []
    torch.manual_seed(topology.rank)
    for name in ("nothing", "nothing", *UPDATES, "nothing"):
        for param in model.parameters():
            assert isinstance(param, DTensor)
            UPDATES[name](param.detach().to_local())
        fcdp.invalidate(model)
        before = _sent(model)
        gathered = {}
        with torch.no_grad():
            model(next(batches(settings, 0)))
            after = _sent(model)
            for unit in engine_of(model).units:
                unit.module.unshard()
                for key, param in unit.module.named_parameters():
                    if not isinstance(param, DTensor):  # another unit's
                        gathered[f"{unit.name} {key}"] = param.detach().clone().view(torch.uint8)
                unit.module.reshard()
        found.append(Step(after - before, gathered))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_adversarial_writes_arrive(ranks: Pools, dtype: torch.dtype | None) -> None:
    raw = Settings(param_dtype=dtype)
    expected = ranks.run(4, write_and_gather, raw)
    actual = ranks.run(4, write_and_gather, replace(raw, gather_codec=fcdp.Delta("always")))
    for mine, theirs in zip(actual, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            for name, words in other.gathered.items():
                assert torch.equal(one.gathered[name], words), name
    sent = [step.inter_node for step in actual[0]]
    whole = expected[0][0].inter_node
    assert sent[0] == whole  # nothing is held yet
    preambles = 3 * (16 + 16)
    assert sent[1] <= preambles + (0 if dtype else whole / 2 + 3 * 4)
