"""Calls of FSDP2 that come after FCDP, and custom collectives of the user's own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fcdp
from tests.fcdp.training import topology_of
from tests.fcdp.upstream.models import mlps
from tests.fcdp.upstream.running import Run, adam, check, on_both_shapes, train
from tests.ranks import Pools


class Counted:
    """Counts calls, and allocates as FSDP2 does."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnGather(Counted, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class OwnReduce(Counted, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def custom(run: Run, which: str) -> None:
    """One unit gets a collective of the user's own once FCDP is set up."""
    model = mlps(2, 6)
    run.shard([*model, model])
    run.cache(model)
    gather, reduce = OwnGather(), OwnReduce()
    if which == "gather":
        model[0].set_custom_all_gather(gather)
    else:
        model[0].set_custom_reduce_scatter(reduce)
    optimizer = adam(model)
    for step in range(3):
        for micro in range(2):
            scope: Any = contextlib.nullcontext()
            if run.cached:
                scope = fcdp.accumulate(model, last=micro == 1)
            with scope:
                loss = model(run.input(4, 6, step=10 * step + micro)).sum()
                run.see(f"loss {step}.{micro}", loss)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.see("calls", (gather.calls, reduce.calls))
    assert gather.calls + reduce.calls >= 6


@pytest.mark.parametrize("which", ["gather", "reduce"])
def test_custom_collectives_after_fcdp(ranks: Pools, which: str) -> None:
    """On 2 × 2 alone: sums of micro-batches before those of ranks are not the same bits."""
    check(ranks, (2, 2), custom, which)


def parent(run: Run) -> None:
    """A head is put on a cached body, and sharded with it."""
    body = mlps(2, 6)
    run.shard([*body, body])
    run.cache(body)
    torch.manual_seed(7)
    model = nn.Sequential(body, nn.Linear(6, 3))
    run.shard([model])
    train(run, model, adam(model), lambda step: model(run.input(4, 6, step=step)).sum())


@on_both_shapes
def test_a_parent_is_sharded_after_fcdp(ranks: Pools, shape: tuple[int, int]) -> None:
    check(ranks, shape, parent)


def unsharded_root(run: Run) -> None:
    """The root itself is not sharded: each layer is a root for FSDP2."""
    model = mlps(3, 6)
    run.shard([*model])
    run.cache(model)
    train(run, model, adam(model), lambda step: model(run.input(4, 6, step=step)).sum())


@on_both_shapes
def test_the_root_is_not_sharded(ranks: Pools, shape: tuple[int, int]) -> None:
    check(ranks, shape, unsharded_root)


@functools.cache
def named_mesh(world_size: int) -> DeviceMesh:
    """One object per process: FSDP2 compares meshes by identity, and DTensor keeps the first."""
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))


def named_dimension(run: Run) -> None:
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


@on_both_shapes
def test_a_mesh_whose_dimensions_are_named(ranks: Pools, shape: tuple[int, int]) -> None:
    if not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    check(ranks, shape, named_dimension)


def sharded_again() -> tuple[str, str]:
    """What ``fully_shard`` says to modules that a cached model holds already."""
    topology = topology_of(2, 1)
    model = mlps(1, 6)
    for unit in [*model, model]:
        fully_shard(unit, mesh=topology.mesh)
    fcdp.cache_parameters(model, topology)
    with pytest.raises(AssertionError, match="already been applied") as twice:
        fully_shard(model[0], mesh=topology.mesh)
    with pytest.raises(ValueError, match="set up on it already") as cached:
        fcdp.cache_parameters(model[0], topology)
    return str(twice.value), str(cached.value)


def test_a_cached_module_is_not_sharded_again(ranks: Pools) -> None:
    ranks.run(2, sharded_again)
