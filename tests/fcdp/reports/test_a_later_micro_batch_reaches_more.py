"""A micro-batch reaches blocks that those before it did not, as where depth is drawn at random.

Smallest case: adapters of all blocks in one unit, of which the first micro-batch uses one block's.
"""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import fcdp
from fcdp.engine import engine_of
from tests.fcdp.on_streams import OnStreams
from tests.fcdp.training import WIDTH, Block, params_of, topology_of
from tests.ranks import Pools


class Net(nn.Module):
    """Blocks of which each micro-batch uses the named ones."""

    def __init__(self, adapter_rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(adapter_rank) for _ in range(3))
        for name, param in self.named_parameters():
            param.requires_grad_("first" in name or "second" in name or not adapter_rank)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = block(x) if str(at) in used else x
        return x


#: The blocks that each micro-batch of each step uses; what none of a step uses has no gradient.
STEPS = [["0", "01", "2"], ["2", "012"], ["12", "1"], ["1", "012", "02"]]


def set_up(engine: str, adapter_rank: int, units: str, **options: Any) -> Net:
    model, topology = Net(adapter_rank), topology_of(2, torch.distributed.get_world_size() // 2)
    blocks: Any = [*model.blocks]
    if units == "pairs":
        blocks = [blocks[:2], blocks[2:]]
    if engine == "fcdp":
        fcdp.shard(model, topology, units=blocks, **options)
        assert units == "pairs" or len(engine_of(model).units) <= 4, "adapters share one"
        return model
    for unit in [*blocks, model]:
        fully_shard(unit, mesh=topology.mesh)
    if engine == "cache_parameters":
        fcdp.cache_parameters(model, topology, **options)
    return model


def trained(engine: str, adapter_rank: int, units: str, place: Any) -> list[torch.Tensor]:
    """Losses, and the parameters that an optimizer with a memory has made of them."""
    model = set_up(engine, adapter_rank, units, comm=fcdp.CommOptions(partial_gradients=place))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.03, eps=1e-3)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses: list[torch.Tensor] = []
    for micro_batches in STEPS:
        for at, used in enumerate(micro_batches):
            last = at == len(micro_batches) - 1
            accumulates = fcdp.is_cached(model)
            with fcdp.accumulate(model, last=last) if accumulates else contextlib.nullcontext():
                x = torch.randn(2, WIDTH, generator=generator, device="cpu")
                loss = model(x.to(torch.get_default_device()), used).square().mean()
                loss.backward()
            losses.append(loss.detach())
        if fcdp.is_cached(model):
            assert fcdp.ledger(model).pending_bytes == 0
        optimizer.step()
        optimizer.zero_grad()
    return [*(loss.cpu() for loss in losses), *(value.cpu() for value in params_of(model).values())]


@pytest.mark.parametrize(
    ("engine", "adapter_rank", "units", "place", "where", "world"),
    [
        ("fcdp", 1, "blocks", "device", "cpu", 2),
        ("fcdp", 1, "blocks", "host", "streams", 4),
        ("fcdp", 0, "pairs", "host", "cpu", 4),
        ("fcdp", 1, "pairs", "device", "cpu", 2),
        ("fcdp", 1, "blocks", "device", "streams", 4),
        ("fcdp", 0, "pairs", "device", "streams", 2),
        ("fcdp", 1, "pairs", "each", "cpu", 4),
        ("fcdp", 0, "blocks", "each", "streams", 2),
        ("cache_parameters", 0, "pairs", "device", "cpu", 2),
        ("cache_parameters", 1, "blocks", "host", "cpu", 4),
    ],
)
def test_micro_batches_that_reach_more_blocks_train_as_with_fsdp2(
    engine: str,
    adapter_rank: int,
    units: str,
    place: str,
    where: str,
    world: int,
    ranks: Pools,
    apart: Pools,
) -> None:
    pools = ranks if where == "cpu" else OnStreams(apart)
    theirs, ours = (
        pools.run(world, trained, each, adapter_rank, units, place) for each in ("fsdp2", engine)
    )
    for mine, others in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-6)
