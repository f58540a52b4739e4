"""HSDP: FCDP inside each replica, and FSDP2's sum of gradients over the replicas."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fcdp
from fcdp.engine import engine_of
from fcdp.partial_gradients import Waiting
from tests.fcdp.releases import since_2_12
from tests.fcdp.test_expert_meshes import STEPS, WIDTH, loss_of, train
from tests.fcdp.training import params_of, topology_of
from tests.fcdp.upstream.running import EXACT, adam, differences
from tests.ranks import Pools, on_ranks


@dataclass(frozen=True)
class Layout:
    nodes: int
    ranks_per_node: int
    replicas: int
    #: Whether replicas lie beside each other on each node; else each has nodes of its own.
    beside: bool = False
    #: Whether all parameters but those of the first layer are frozen.
    frozen: bool = False
    #: Whether dimensions of the mesh have names, and parameters are DTensors on it already.
    named: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def nodes_of_replica(self) -> int:
        return self.nodes if self.beside else self.nodes // self.replicas


#: Placements on a mesh with named dimensions before anything is sharded.
WHOLE = [Replicate(), Replicate()]


class Model(nn.Module):
    """Its layers compute with DTensors over ``mesh``, if one is given."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mesh = mesh
        for layer in self.layers if mesh is not None else []:
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, WHOLE)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, WHOLE, run_check=False)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.to_local().clone() if isinstance(x, DTensor) else x


@lru_cache
def mesh_of(world_size: int, replicas: int, beside: bool) -> DeviceMesh:
    ranks = torch.arange(world_size)
    ranks = ranks.view(-1, replicas).T if beside else ranks.view(replicas, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def set_up(layout: Layout, *, cached: bool) -> nn.Module:
    torch.manual_seed(0)
    mesh = mesh_of(layout.world_size, layout.replicas, layout.beside)
    model = Model(mesh if layout.named else None)
    for layer in [*model.layers][1:]:
        layer.requires_grad_(not layout.frozen)
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
    if layout.named:
        options["dp_mesh_dims"] = fsdp.DataParallelMeshDims(shard="shard", replicate="replicate")
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh, **options)
    if cached:
        topology = topology_of(layout.nodes, layout.ranks_per_node)
        fcdp.cache_parameters(model, topology, cache=fcdp.CacheOptions(verify=True))
    return model


def problems(layout: Layout) -> list[str]:
    nodes = {layout.world_size // layout.replicas: layout.nodes_of_replica}
    plain = train(set_up(layout, cached=False), nodes)
    with mock.patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as over_replicas:
        seen = train(model := set_up(layout, cached=True), nodes)
    summed = [call.args[0] for call in over_replicas.call_args_list]
    times = sum(not isinstance(each, Waiting) for each in summed)
    return [*differences(plain, seen, EXACT), *miscounted(layout, model, times)]


def miscounted(layout: Layout, model: nn.Module, over_replicas: int) -> list[str]:
    """Differences between the ledger and the closed form inside a replica.

    Sums over replicas are made once per step and trained unit.
    """
    gathered = reduced = trained = 0
    for unit in engine_of(model).units:
        others = unit.topology.nodes - 1
        assert others == layout.nodes_of_replica - 1
        gathered += (STEPS if unit.trainable else 1) * others * unit.shard_bytes
        reduced += STEPS * unit.trainable * others * unit.shard_numel * 8
        trained += unit.trainable
    assert over_replicas == STEPS * trained
    sent, expected = fcdp.ledger(model).snapshot()["inter_node"], {"forward": gathered}
    expected["reduce"] = reduced
    return [] if sent == expected else [f"sent {sent}, expected {expected}"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, 1, replicas=2),
        Layout(2, 2, replicas=2, beside=True),
        Layout(4, 1, replicas=2, frozen=True),
        pytest.param(Layout(4, 1, replicas=2, named=True), marks=since_2_12),
        Layout(4, 2, replicas=2),
    ],
    ids=str,
)
def test_training_equals_hsdp_to_the_bit(ranks: Pools, layout: Layout) -> None:
    """Accumulated gradients cross nodes once per step, and the sums over replicas follow them."""
    assert ranks.run(layout.world_size, problems, layout) == [[]] * layout.world_size


@on_ranks(4)
def test_checkpoints_and_exports_of_replicas(tmp_path: Path) -> None:
    """A layout reads the save of another; replicas may be in any order on a mesh."""
    saved = set_up(Layout(4, 1, replicas=2), cached=True)
    other = set_up(Layout(2, 2, replicas=2, beside=True), cached=True)
    first, second = adam(saved), adam(other)
    loss_of(saved, 0).backward()
    first.step()
    first.zero_grad()
    fcdp.save(saved, first, tmp_path)
    fcdp.load(other, second, tmp_path)
    for model, optimizer in ((saved, first), (other, second)):
        loss_of(model, 1).backward()
        optimizer.step()
    torch.testing.assert_close(params_of(other), params_of(saved), **EXACT)
    descending = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("replicate", "shard"))
    mixed = Model(None)
    for module in mixed.layers:
        fully_shard(module, mesh=descending)
    mixed.register_parameter("last", nn.Parameter(torch.ones(4)))
    fully_shard(mixed, mesh=mesh_of(4, 2, beside=False))
    fcdp.cache_parameters(mixed, topology_of(4, 1))
    fcdp.export(mixed, tmp_path)
    dist.barrier()
    written = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(written, params_of(mixed), **EXACT)
