"""FCDP over the data-parallel dimension of a mesh whose other dimension is tensor-parallel."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fcdp
from fcdp.engine import engine_of
from fcdp.exporting import _put_in_place
from tests.fcdp.test_topology import launched
from tests.fcdp.training import captured, params_of, update
from tests.fcdp.upstream.models import MLP
from tests.fcdp.upstream.running import Run, adam, both, train
from tests.ranks import Pools, on_ranks

WIDTH, TENSOR, STEPS = 12, 2, 4


@dataclass(frozen=True)
class Layout:
    nodes: int
    ranks_per_node: int
    #: Parameters that tensor parallelism leaves whole share units with those that it cuts.
    norm: bool = False
    #: As torchrun tells it, instead of by ``ranks_per_node``.
    launched: bool = False

    @property
    def data(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def world_size(self) -> int:
        return self.data * TENSOR


@lru_cache
def mesh_of(data: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, TENSOR), mesh_dim_names=("dp", "tp"))


@lru_cache
def topology_of(layout: Layout) -> fcdp.Topology:
    mesh = mesh_of(layout.data)["dp"]
    if not layout.launched:
        return fcdp.Topology.of_mesh(mesh, layout.ranks_per_node)
    local_world_size = layout.ranks_per_node * TENSOR
    with launched(dist.get_rank() % local_world_size, local_world_size):
        return fcdp.Topology.of_mesh(mesh)


def parallel_model(layout: Layout) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(2):
        norm = nn.LayerNorm(WIDTH) if layout.norm else nn.Identity()
        model.append(nn.Sequential(norm, MLP(WIDTH, 2)))
    plan = {"*.1.in_proj": ColwiseParallel(), "*.1.out_proj": RowwiseParallel()}
    parallelize_module(model, mesh_of(layout.data)["tp"], plan)  # type: ignore[arg-type]
    return model


def sharded(layout: Layout) -> nn.Sequential:
    model = parallel_model(layout)
    fcdp.shard(model, topology_of(layout), units=model, cache=fcdp.CacheOptions(verify=True))
    return model


def trains(run: Run, layout: Layout, how: str) -> None:
    """Train, sharded by ``fcdp.shard`` or by ``fully_shard`` and ``fcdp.cache_parameters``."""
    if run.cached and how == "shard":
        model = sharded(layout)
    else:
        model = run.set_up(parallel_model(layout))
    train(
        run,
        model,
        adam(model),
        lambda step: model(run.input(3, WIDTH, step=step)).sum(),
        steps=STEPS,
    )
    if run.cached:
        check_bytes(layout, model)


def check_bytes(layout: Layout, model: nn.Module) -> None:
    """Each shard crosses nodes once per step, as its gradients do, and no other dimension's."""
    units = engine_of(model).units
    shards = sum(unit.shard_bytes for unit in units)
    assert shards == sum(param.to_local().nbytes for unit in units for param in unit.params)
    sent = fcdp.ledger(model).snapshot()
    across = (layout.nodes - 1) * shards * STEPS
    assert sent["inter_node"] == {"forward": across, "reduce": across}
    inside = layout.nodes * (layout.ranks_per_node - 1) * shards * STEPS
    assert sent.get("intra_node", {}).get("forward", 0) == inside


def differences(layout: Layout, how: str) -> list[str]:
    return both(topology_of(layout), trains, (layout, how))


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        (Layout(2, 1), "shard"),
        (Layout(2, 1, norm=True), "shard"),
        (Layout(2, 2, launched=True), "shard"),
        (Layout(2, 1), "cache_parameters"),
    ],
    ids=str,
)
def test_training_matches_fsdp2(ranks: Pools, layout: Layout, how: str) -> None:
    """``launched``: the ranks of a node hold both tensor-parallel shards."""
    assert ranks.run(layout.world_size, differences, layout, how) == [[]] * layout.world_size


@on_ranks(4)
def test_host_memory_is_planned_for_all_ranks_of_a_node() -> None:
    """The launcher says how many there are."""
    layout = Layout(2, 1, launched=True)
    with launched(dist.get_rank() % TENSOR, TENSOR), captured() as (printed, _):
        sharded(layout)
        assert topology_of(layout).processes_per_node == TENSOR
    assert dist.get_rank() or "of host memory per node, 2 × (cache" in printed.getvalue()


@on_ranks(4)
def test_a_checkpoint_holds_all_tensor_parallel_shards(tmp_path: Path) -> None:
    """Steps after a load are those that would have come without."""
    run = Run(topology_of(Layout(2, 1)), cached=True)
    saved, other = sharded(Layout(2, 1)), sharded(Layout(2, 1))
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    first, second = adam(saved), adam(other)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        update(model(run.input(3, WIDTH, step=number)).sum(), optimizer)

    step(saved, first, 0)
    fcdp.save(saved, first, tmp_path, extra={"step": 1})
    assert fcdp.load(other, second, tmp_path) == {"step": 1}
    step(saved, first, 1)
    step(other, second, 1)
    torch.testing.assert_close(params_of(other), params_of(saved), rtol=0, atol=0)


@on_ranks(4)
def test_one_rank_exports_whole_parameters(tmp_path: Path) -> None:
    """Two ranks are the first of their topologies."""
    model = sharded(Layout(2, 1))
    with mock.patch("fcdp.exporting._put_in_place", wraps=_put_in_place) as put:
        fcdp.export(model, tmp_path)
    assert put.called == (dist.get_rank() == 0)
    params = params_of(model)
    dist.barrier()
    written = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(written, params, rtol=0, atol=0)


@on_ranks(4)
def test_other_meshes_are_refused() -> None:
    layout = Layout(2, 1)
    topology, model = topology_of(layout), parallel_model(layout)
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model[0].weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), other, [Shard(1)]))
    with pytest.raises(ValueError, match=r"^0\.weight: is a DTensor on mesh"):
        fcdp.shard(model, topology, units=model)
    data, tensor = divmod(dist.get_rank(), TENSOR)
    beside, ours = [TENSOR * data, TENSOR * data + 1], [tensor, tensor + TENSOR]
    message = f"over ranks {beside}; must be those of the topology, {ours}"
    plain = fully_shard(nn.Linear(4, 4), mesh=mesh_of(2)["tp"])
    with pytest.raises(ValueError, match=re.escape(message)):
        fcdp.cache_parameters(plain, topology)
