"""Calls of FSDP2 that come after FCDP, and custom collectives of the user's own."""

import functools

import pytest
import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, adam, cases, train, train_on


@cases()
def test_a_parent_is_sharded_after_fcdp(run: Run) -> None:
    """A head is put on a cached body, and sharded with it."""
    body = run.set_up(mlps(2, 6))
    torch.manual_seed(7)
    model = nn.Sequential(body, nn.Linear(6, 3))
    run.shard([model])
    train_on(run, model, 4, 6)


@cases()
def test_the_root_is_not_sharded(run: Run) -> None:
    """The root itself is not sharded: each layer is a root for FSDP2."""
    model = mlps(3, 6)
    run.set_up(model, [*model])
    train_on(run, model, 4, 6)


@functools.cache
def named_mesh(world_size: int) -> DeviceMesh:
    """One object per process: FSDP2 compares meshes by identity, and DTensor keeps the first."""
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))


@pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch has no DataParallelMeshDims"
)
@cases()
def test_a_mesh_whose_dimensions_are_named(run: Run) -> None:
    """Parameters that are DTensors already, on a mesh whose one dimension is named."""
    model = mlps(2, 6)
    mesh = named_mesh(run.topology.world_size)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(
                module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()]))
            )
    names = fsdp.DataParallelMeshDims(shard="data")
    assert (names.shard_names, names.replicate_names) == (("data",), ())
    for unit in [*model, model]:
        fully_shard(unit, mesh=mesh, dp_mesh_dims=names)
    run.cache(model)

    def loss(step: int) -> torch.Tensor:
        x = DTensor.from_local(run.input(4, 6, step=step), mesh, [Replicate()], run_check=False)
        return model(x).sum()

    train(run, model, adam(model), loss)
