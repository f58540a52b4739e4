"""Every policy on every topology, with random sizes, against one process without any sharding.

The suite runs a sample of each product, ``pytest --exhaustive`` all of it (minutes). In float64, so
that the order of summation shows nowhere and any stale or misplaced byte does.
Checksums and poison are on: an entry that is read too late or too early gives NaN or an error.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

import fcdp
from fcdp.exchange import Exchanges
from fcdp.partial_gradients import PartialsPlace
from tests.fcdp.training import topology_of, whole
from tests.ranks import Pools

STEPS = 2
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (2, 3)]
POLICIES = {
    "none": fcdp.NoCache(),
    "device": fcdp.DeviceCache(),
    "host": fcdp.HostCache(),
    "disk": fcdp.DiskCache(Path("/tmp")),
    "threshold": fcdp.Threshold(0.5),
    "budget": fcdp.Budget(device=700, host=700, disk=700, directory=Path("/tmp")),
    "auto": fcdp.Auto(measured_gathers=2),
}


@dataclass(frozen=True)
class Case:
    tuning: str
    accumulation: int
    checkpointing: bool
    seed: int

    @property
    def partials(self) -> PartialsPlace:
        return "host" if self.seed % 2 else "device"

    @property
    def exchanges(self) -> Exchanges:
        plain = self.partials == "device"
        return "flat" if plain and self.seed % 4 else "hierarchical"


#: Parameters that are trained, by a part of their names.
TUNINGS = {"full": "", "lora": "adapter", "head": "head"}


class Scale(nn.Module):
    """One element."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Block(nn.Module):
    def __init__(self, width: int, inner: int, rank: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = Scale()
        self.adapter = nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(self.down(torch.tanh(self.up(x)))) + self.adapter(x)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        sizes = random.Random(case.seed)
        width = sizes.randint(1, 9)
        self.inner = nn.Linear(3, width)
        self.blocks = nn.ModuleList(
            Block(width, sizes.randint(1, 13), sizes.randint(1, 3))
            for _ in range(sizes.randint(1, 3))
        )
        self.head = nn.Linear(width, 1)
        self.checkpointing = case.checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x)


def build(case: Case) -> Net:
    torch.manual_seed(case.seed)
    model = Net(case).double()
    for name, param in model.named_parameters():
        param.requires_grad_(TUNINGS[case.tuning] in name)
    return model


def inputs(case: Case, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    while True:
        yield torch.randn(2, 3, generator=generator, dtype=torch.float64)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def expected_params(case: Case, world_size: int) -> dict[str, torch.Tensor]:
    model = build(case)
    optimizer = optimizer_of(model)
    data = [inputs(case, rank) for rank in range(world_size)]
    for _ in range(STEPS):
        for _, source in product(range(case.accumulation), data):
            loss = model(next(source)).square().mean() / case.accumulation / world_size
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def worst_difference(nodes: int, ranks_per_node: int, name: str, case: Case) -> float:
    topology = topology_of(nodes, ranks_per_node)
    model = build(case)
    fcdp.shard(
        model,
        topology,
        units=model.blocks,
        policy=POLICIES[name],
        partial_gradients=case.partials,
        exchanges=case.exchanges,
        verify=True,
        poison=True,
    )
    optimizer = optimizer_of(model)
    data = inputs(case, topology.rank)
    for _ in range(STEPS):
        for micro in range(case.accumulation):
            with fcdp.accumulate(model, last=micro == case.accumulation - 1):
                (model(next(data)).square().mean() / case.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = expected_params(case, topology.world_size)
    return max(
        (whole(param).detach() - expected[key]).abs().max().item()
        for key, param in model.named_parameters()
    )


def worst_of_all(nodes: int, ranks_per_node: int, cases: list[tuple[str, Case]]) -> list[float]:
    return [worst_difference(nodes, ranks_per_node, name, case) for name, case in cases]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), TOPOLOGIES)
def test_parameters_equal_those_of_one_process(
    ranks: Pools, nodes: int, ranks_per_node: int, request: pytest.FixtureRequest
) -> None:
    """A sample of the product with each policy, in one call of the ranks."""
    world_size, cases = nodes * ranks_per_node, []
    for policy in POLICIES:
        seeds = random.Random(f"{nodes}{ranks_per_node}{policy}")
        product_of_policy = [
            Case(tuning, accumulation, checkpointing, seeds.randrange(2**16))
            for tuning, accumulation, checkpointing in product(TUNINGS, [1, 4], [False, True])
        ]
        if not request.config.getoption("--exhaustive"):
            product_of_policy = seeds.sample(
                product_of_policy, 2 if nodes > 1 and world_size <= 4 else 1
            )
        cases += [(policy, case) for case in product_of_policy]
    for worst in ranks.run(world_size, worst_of_all, nodes, ranks_per_node, cases):
        assert [case for case, found in zip(cases, worst, strict=True) if not found < 1e-12] == []
