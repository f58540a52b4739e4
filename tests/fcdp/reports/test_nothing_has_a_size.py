"""Parameters of no rows, units of no bytes and batches of no tokens train as with FSDP2."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard

import fcdp
from tests.fcdp.training import topology_of
from tests.ranks import Pools, on_ranks

#: Shapes of a parameter, and whether it is trained.
Part = tuple[tuple[int, ...], bool]
POLICIES = ("host", "device", "none", "disk")


class Block(nn.Module):
    """Parameters of some shapes, and a ``layer`` unless there is none.

    All are used but trained ones of no elements, whose gradients FSDP2 cannot reduce.
    """

    def __init__(self, parts: list[Part], width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(parts))
        self.params = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator) / 9, requires_grad=trained)
            for shape, trained in parts
        )
        self.layer = nn.Linear(width, width) if width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.layer is None else x + self.layer(x)
        for param in self.params:
            if param.numel() or not param.requires_grad:
                x = x * (1 + param.square().sum())
        return x


class Net(nn.Module):
    def __init__(self, blocks: list[tuple[list[Part], int]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(*block) for block in blocks)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        head: torch.Tensor = self.head(x)
        return head


def trained(
    how: str, blocks: list[tuple[list[Part], int]], rows: list[int], policy: str, detect: bool
) -> list[float]:
    """Losses of three steps of ``rows`` rows per rank."""
    topology = topology_of(2, len(rows) // 2)
    model = Net(blocks)
    options: dict[str, Any] = {"policy": policy, "cache": fcdp.CacheOptions(detect_writes=detect)}
    if how == "shard":
        fcdp.shard(model, topology, units=model.layers, **options)
    else:
        for module in [*model.layers, model]:
            fully_shard(module, mesh=topology.mesh)
        if how == "cache_parameters":
            fcdp.cache_parameters(model, topology, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(3):
        x = torch.full((rows[topology.rank], 4), 0.1 * (topology.rank + step + 1))
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check(blocks: list[tuple[list[Part], int]], rows: list[int], policy: str, detect: bool) -> None:
    expected = trained("fsdp2", blocks, rows, policy, detect)
    for how in ("shard", "cache_parameters"):
        losses = trained(how, blocks, rows, policy, detect)
        assert losses == pytest.approx(expected, rel=0.0, abs=0.0, nan_ok=True), how


EMPTY: Part = ((0, 16), True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "blocks",
    [
        [([EMPTY], 4), ([EMPTY], 4)],
        [([EMPTY], 0), ([((4, 2), True)], 4)],
        [([EMPTY, ((0,), False)], 0), ([((1, 0, 2), False), ((1, 1), False)], 4)],
    ],
    ids=["beside a layer", "alone", "trained and frozen"],
)
@on_ranks(2)
def test_a_parameter_of_no_rows(blocks: list[tuple[list[Part], int]], policy: str) -> None:
    for detect in (True, False):
        check(blocks, [2, 2], policy, detect)


@on_ranks(2)
def test_a_batch_of_no_rows() -> None:
    for rows in ([0, 2], [0, 0]):
        check([([((4, 2), True)], 4), ([((2, 2), False)], 4)], rows, "host", True)


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), min_size=1, max_size=3).map(tuple)
parts = st.lists(st.tuples(shapes, st.booleans()), max_size=4)
nets = st.lists(st.tuples(parts, st.sampled_from([0, 4])), min_size=1, max_size=3)


@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    blocks=nets,
    rows=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    policy=st.sampled_from(["host", "device"]),
    detect=st.booleans(),
)
def test_shapes_of_zeros_and_ones(
    ranks: Pools,
    blocks: list[tuple[list[Part], int]],
    rows: list[int],
    policy: str,
    detect: bool,
) -> None:
    ranks.run(2, check, blocks, rows, policy, detect)
