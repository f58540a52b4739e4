"""Training in half precision with codecs that lose nothing: bit for bit as without.

Each has units in all three tiers, micro-batches, a checkpoint that it goes back to and every
adversarial write; on processes reductions are coded too, which accelerators refuse. With
``--exhaustive`` 200 steps at five rates.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fcdp
from fcdp.engine import engine_of
from tests.fcdp import training
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import Settings
from tests.ranks import Pools

UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda shard: None,
    "one unit in the last place": lambda shard: shard.mul_(1 + 2**-8),
    "signs": lambda shard: shard.neg_(),
    "negative zeros": lambda shard: shard.fill_(-0.0),
    "infinities": lambda shard: shard.div_(0.0),
    "payloads of NaN": lambda shard: shard.view(torch.int32).random_(0x7F800001, 0x7FFFFFFF),
    "denormals": lambda shard: shard.uniform_(-1e-39, 1e-39),
    "all others": lambda shard: shard.normal_(),
}


class Trained(NamedTuple):
    """Bits that one rank computed, where they were cached and how they were sent."""

    #: Losses, logits after each write, and parameters.
    computed: list[torch.Tensor]
    tiers: set[str | None]
    sent: dict[str, int]


def train(
    settings: Settings, rate: float, steps: int, codec: fcdp.Delta | None, directory: Path
) -> Trained:
    on_cpu = torch.get_default_device().type == "cpu"
    one = 600 * 2 // settings.world_size  # a unit of three
    run = training.Run(
        replace(
            settings,
            policy=fcdp.Budget(device=one, host=one, disk=one, directory=directory),
            gather_codec=codec,
            reduce_codec=fcdp.Exact("always") if codec and on_cpu else None,
        )
    )
    model, optimizer, computed = run.model, run.optimizer, []
    optimizer.param_groups[0].update(lr=rate, eps=1e-8)
    for step in range(steps):
        for last in (False, True):
            with fcdp.accumulate(model, last=last):
                loss = run.loss()
                loss.backward()
            computed.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        interval = steps // len(UPDATES)
        if step % interval == interval - 1:
            name = [*UPDATES][step // interval]
            computed.append(logits_after(name, model, next(run.data)[:, :-1], run.topology.rank))
        if step == steps // 3:
            fcdp.save(model, optimizer, directory / f"checkpoint {bool(codec)}")
        if step == steps // 2:
            fcdp.load(model, optimizer, directory / f"checkpoint {bool(codec)}")
    computed += [training.whole(param).detach() for param in model.parameters()]
    engine = engine_of(model)
    tiers = {engine.entries[unit].tier for unit in engine.units}
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


@pytest.mark.parametrize(
    ("dtype", "ranks_per_node"),
    [(torch.bfloat16, 2), (torch.float16, 2), (torch.bfloat16, 1)],
    ids=["bf16", "fp16", "bf16 on an accelerator"],
)
def test_training_is_bit_for_bit_as_without(
    ranks: Pools,
    apart: Pools,
    dtype: torch.dtype,
    ranks_per_node: int,
    rate: float,
    steps: int,
    tmp_path: Path,
) -> None:
    on_processes = ranks_per_node == 2
    pools = ranks if on_processes else OnStreams(apart)
    # Of the last unit too: it is in the cache only then.
    settings = Settings(
        2, ranks_per_node, param_dtype=dtype, reduce_dtype=dtype, reshard_after_forward=True
    )
    codec = fcdp.Delta("always" if rate > 1e-5 else "smallest")
    expected, actual = (
        pools.run(
            *(settings.world_size, train, settings, rate, steps, each, tmp_path),
            timeout_s=400.0 + 4 * steps,
        )
        for each in (None, codec)
    )
    for mine, other in zip(actual, expected, strict=True):
        assert all(map(torch.equal, mine.computed, other.computed))
        assert len(mine.computed) == len(other.computed)
        assert mine.tiers == {"device", "host", "disk"}
        assert mine.sent["forward"] < other.sent["forward"]
        assert (mine.sent["reduce"] != other.sent["reduce"]) == on_processes
