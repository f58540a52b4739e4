"""Training at the rates of fine-tuning: bit for bit as without codecs.

Each has units in all three tiers, micro-batches, a checkpoint that it goes back to and every
adversarial write; on processes reductions are coded too, which accelerators refuse. With
``--exhaustive`` 200 steps at five rates.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fcdp
from fcdp.engine import engine_of
from tests.fcdp import training
from tests.fcdp.delta.test_training import UPDATES
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import Settings
from tests.ranks import Pools


class Trained(NamedTuple):
    """Bits that one rank computed, and where and how it had them."""

    #: Losses, logits after each write, and parameters.
    computed: list[torch.Tensor]
    tiers: set[str | None]
    sent: dict[str, int]


def train(
    ranks_per_node: int, rate: float, steps: int, codec: fcdp.Delta | None, directory: Path
) -> Trained:
    topology = training.topology_of(2, ranks_per_node)
    exact = fcdp.Exact("always") if codec and topology.mesh.device_type == "cpu" else None
    one = 600 // ranks_per_node  # unit of three
    settings = Settings(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
        reshard_after_forward=True,  # of the last unit too, which is in the cache only then
        policy=fcdp.Budget(device=one, host=one, disk=one, directory=directory),
        gather_codec=codec,
        reduce_codec=exact,
    )
    model = training.shard_with_fcdp(training.make_model(settings), topology, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    data, computed = training.batches(settings, topology.rank), []
    for step in range(steps):
        for last in (False, True):
            with fcdp.accumulate(model, last=last):
                loss = training.loss_of(model, next(data))
                loss.backward()
            computed.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        every = steps // len(UPDATES)
        if step % every == every - 1:
            name = [*UPDATES][step // every]
            computed.append(logits_after(name, model, next(data)[:, :-1], topology.rank))
        if step == steps // 3:
            fcdp.save(model, optimizer, directory / f"checkpoint {bool(codec)}")
        if step == steps // 2:
            fcdp.load(model, optimizer, directory / f"checkpoint {bool(codec)}")
    computed += [training.whole(param).detach() for param in model.parameters()]
    engine = engine_of(model)
    tiers = {engine.cache.tier_of(unit) for unit in engine.units}
    sent = fcdp.ledger(model).snapshot()["inter_node"]
    return Trained([each.cpu().view(-1).view(torch.uint8) for each in computed], tiers, sent)


def logits_after(
    name: str, model: torch.nn.Module, tokens: torch.Tensor, rank: int
) -> torch.Tensor:
    """Logits with shards that were written so, and are then what they were."""
    shards = [param.detach().to_local() for param in model.parameters()]  # type: ignore[attr-defined]
    before = [shard.cpu().clone() for shard in shards]
    torch.manual_seed(rank)  # what follows waits for nothing: ranks may be threads
    written = [shard.clone() for shard in before]
    for shard in written:
        UPDATES[name](shard)
    for values in (written, before):
        for shard, value in zip(shards, values, strict=True):
            shard.copy_(value)
        fcdp.invalidate(model)
        if values is written:
            with torch.no_grad():
                logits: torch.Tensor = model(tokens)
    return logits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    exhaustive = metafunc.config.getoption("--exhaustive")
    rates = [1e-5, 3e-4, 3e-5, 1e-6, 0.0] if exhaustive else [1e-5]
    steps = 200 if exhaustive else 8
    metafunc.parametrize(("rate", "steps"), [(rate, steps) for rate in rates])


@pytest.mark.parametrize("ranks_per_node", [2, 1], ids=["processes", "accelerator"])
def test_training_is_bit_for_bit_as_without(
    ranks: Pools, apart: Pools, ranks_per_node: int, rate: float, steps: int, tmp_path: Path
) -> None:
    pools = ranks if ranks_per_node > 1 else OnStreams(apart, samples=False)
    codec = fcdp.Delta("always" if rate > 1e-5 else "smallest")
    size, limit = 2 * ranks_per_node, 400.0 + 4 * steps
    given = (ranks_per_node, rate, steps)
    expected = pools.run(size, train, *given, None, tmp_path, timeout_s=limit)
    actual = pools.run(size, train, *given, codec, tmp_path, timeout_s=limit)
    for mine, other in zip(actual, expected, strict=True):
        assert all(map(torch.equal, mine.computed, other.computed))
        assert len(mine.computed) == len(other.computed)
        assert mine.tiers == {"device", "host", "disk"}
        assert mine.sent["forward"] < other.sent["forward"]
