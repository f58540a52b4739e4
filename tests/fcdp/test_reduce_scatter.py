"""What is asked of which group, and that micro-batches give gradients to the same parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fcdp
from fcdp.codec import Codecs
from fcdp.counts import Ledger
from fcdp.engine import Engine
from fcdp.partial_gradients import OnDevice
from fcdp.reduce_scatter import HierarchicalReduceScatter
from tests.fcdp.stand_ins import Place, StandInUnit
from tests.fcdp.training import topology_of
from tests.ranks import on_ranks


class Sometimes(nn.Module):
    """Of two layers of one unit, the second is used where the input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return self.sometimes(y) if x.sum() > 0 else y


@pytest.mark.parametrize("codec", [None, fcdp.BlockInt8()], ids=["plain", "encoded"])
@on_ranks(2)
def test_gradients_of_other_parameters_are_refused(codec: fcdp.Codec | None) -> None:
    model = nn.Sequential(Sometimes())
    fcdp.shard(
        model,
        topology_of(2, 1),
        units=[model[0]],
        reduce_codec=codec,
        error_feedback=codec is not None,
    )
    x = torch.ones(1, 3)
    with fcdp.accumulate(model, last=False):
        model(-x).sum().backward()
    message = (
        "other parameters received gradients in this micro-batch.*"
        r"set_reduce_scatter_unused_params\(True\)"
    )
    with pytest.raises(RuntimeError, match=message), fcdp.accumulate(model, last=True):
        model(x).sum().backward()


OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM]


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_gradients_are_scaled_once(ranks_per_node: int, op: dist.ReduceOp.RedOpType) -> None:
    """By NCCL, which FSDP2 asks for a sum of scaled gradients: with gloo it divides the sum."""
    unit: Any = StandInUnit("unit", 4)
    topology: Any = Place(2, 0, ranks_per_node)
    group: Any = None
    ledger = Ledger()
    reduce = HierarchicalReduceScatter(
        unit, topology, OnDevice(ledger), mock.Mock(), ledger, encoded=None
    )
    asked: list[Any] = []

    def noting(_: Any, __: Any, op: Any, group: Any, *_coded: Any) -> list[Any]:
        asked.append((op, group))
        return []

    with (
        mock.patch("fcdp.reduce_scatter.reduce_scatter", noting),
        mock.patch("fcdp.reduce_scatter.reduce_scatter_parts", noting),
    ):
        reduce(torch.empty(1), torch.empty(2 * ranks_per_node), group, op)
    averaged = op == dist.ReduceOp.AVG
    across = op if averaged or ranks_per_node == 1 else dist.ReduceOp.SUM
    inside = [(op, "intra of reductions")] if ranks_per_node > 1 else []
    assert asked == [*inside, (across, "inter of reductions")]


@pytest.mark.parametrize(
    ("device_type", "allowed", "asked"),
    [("cuda", 1, [2]), ("cuda", 3, []), ("cuda", None, []), ("cpu", 1, [])],
)
def test_a_second_reduction_may_be_in_flight_where_fsdp2_has_its_default(
    device_type: str, allowed: int | None, asked: list[int]
) -> None:
    """Backward would wait for the reduction before, which crosses nodes; a user's limit stays."""
    group = SimpleNamespace(reduce_scatter_max_input_buffers=allowed)
    unit = mock.Mock(group=group)
    topology = SimpleNamespace(
        mesh=SimpleNamespace(device_type=device_type), reduce_inter=None, nodes=2
    )
    engine: Any = SimpleNamespace(
        topology=topology,
        ledger=Ledger(),
        _encoded=[],
        _reductions={},
        _partials=mock.Mock(),
        _world=None,
        _exact=None,
        _in_flight=mock.Mock(),
    )
    Engine._reduce_by_hierarchy(engine, unit, Codecs())  # type: ignore[arg-type]
    calls = unit.module.set_reduce_scatter_max_input_buffers.call_args_list
    assert calls == [mock.call(number, recurse=False) for number in asked]
