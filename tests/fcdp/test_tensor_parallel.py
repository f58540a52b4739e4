"""FCDP over the data-parallel dimension of a mesh whose other dimension is tensor-parallel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fcdp
from fcdp.engine import engine_of
from fcdp.exporting import _put_in_place
from tests.fcdp.test_topology import launched
from tests.fcdp.training import said, whole
from tests.ranks import Pools, on_ranks

VOCABULARY, WIDTH, INNER, LENGTH, STEPS = 24, 12, 20, 7, 3
TENSOR = 2


class Block(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Model(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


def parallel_model(layout: Layout) -> Model:
    torch.manual_seed(0)
    model = Model(layout.norm)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index in range(len(model.blocks)):
        plan[f"blocks.{index}.up"] = ColwiseParallel()
        plan[f"blocks.{index}.down"] = RowwiseParallel()
    parallelize_module(model, mesh_of(layout.data)["tp"], plan)
    return model


def shard(layout: Layout, engine: str) -> Model:
    model = parallel_model(layout)
    topology = topology_of(layout)
    if engine == "fcdp":
        fcdp.shard(model, topology, units=model.blocks, verify=True)
        return model
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=topology.mesh)
    if engine == "cached":
        fcdp.cache_parameters(model, topology)
    return model


def batches(layout: Layout) -> Iterator[torch.Tensor]:
    """Of this data-parallel rank: alike for all ranks that share its parameters' shards."""
    generator = torch.Generator().manual_seed(1000 + topology_of(layout).rank)
    while True:
        yield torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-3)


def steps(model: Model, optimizer: torch.optim.Optimizer, data: Iterator[torch.Tensor]) -> Any:
    losses, norms = [], []
    for _ in range(STEPS):
        tokens = next(data)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if isinstance(model.blocks[0].norm, nn.Identity):  # it takes parameters of one mesh
            norms.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(param).detach() for name, param in model.named_parameters()}


def train(layout: Layout, engine: str) -> tuple[Any, dict[str, torch.Tensor]]:
    model = shard(layout, engine)
    result = steps(model, make_optimizer(model), batches(layout))
    if engine != "fsdp2":
        check_bytes(layout, model)
    return result, params_of(model)


def check_bytes(layout: Layout, model: nn.Module) -> None:
    """Each shard crosses nodes once per step, as its gradients do: no other dimension's."""
    units = engine_of(model).units
    shards = sum(unit.shard_bytes for unit in units)
    if layout.data == 2:  # which divides all rows
        assert shards == sum(param.to_local().nbytes for unit in units for param in unit.params)
    sent = fcdp.ledger(model).snapshot()
    across = (layout.nodes - 1) * shards * STEPS
    assert sent["inter_node"] == {"forward": across, "reduce": across}
    inside = layout.nodes * (layout.ranks_per_node - 1) * shards * STEPS
    assert sent.get("intra_node", {}).get("forward", 0) == inside


def compare(ranks: Pools, layout: Layout, engine: str) -> None:
    """Bit for bit where two ranks reduce: of more, gloo's ring and the hierarchy add otherwise."""
    tolerance = 0.0 if layout.data <= 2 else 1e-6
    expected = ranks.run(layout.world_size, train, layout, "fsdp2")
    for wanted, got in zip(
        expected, ranks.run(layout.world_size, train, layout, engine), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    (losses, norms), _ = expected[0]
    assert len(set(losses)) == STEPS
    assert len(norms) == (0 if layout.norm else STEPS)


LAYOUTS = [Layout(2, 1), Layout(2, 1, norm=True), Layout(2, 2, launched=True)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_matches_fsdp2(ranks: Pools, layout: Layout) -> None:
    """``launched``: the ranks of a node hold both tensor-parallel shards."""
    compare(ranks, layout, "fcdp")


def test_a_model_that_fully_shard_has_sharded_can_be_cached(ranks: Pools) -> None:
    compare(ranks, Layout(2, 1), "cached")


@on_ranks(4)
def test_host_memory_is_planned_for_all_ranks_of_a_node() -> None:
    """As the launcher tells."""
    layout = Layout(2, 1, launched=True)
    with launched(dist.get_rank() % TENSOR, TENSOR), said() as (printed, _):
        shard(layout, "fcdp")
        assert topology_of(layout).processes_per_node == TENSOR
    assert dist.get_rank() or "of host memory per node, 2 × (cache" in printed.getvalue()


@on_ranks(4)
def test_a_checkpoint_holds_all_tensor_parallel_shards(tmp_path: Path) -> None:
    """Steps after a load are those that would have come without."""
    layout = Layout(2, 1)
    kept = shard(layout, "fcdp")
    optimizer, data = make_optimizer(kept), batches(layout)
    steps(kept, optimizer, data)
    fcdp.save(kept, optimizer, tmp_path, extra={"step": STEPS})
    expected = steps(kept, optimizer, data)
    data = batches(layout)
    for _ in range(STEPS):
        next(data)
    other = shard(layout, "fcdp")
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    second = make_optimizer(other)
    assert fcdp.load(other, second, tmp_path) == {"step": STEPS}
    assert steps(other, second, data) == expected
    torch.testing.assert_close(params_of(other), params_of(kept), rtol=0, atol=0)


@on_ranks(4)
def test_one_rank_exports_whole_parameters(tmp_path: Path) -> None:
    """Two ranks are the first of their topologies."""
    model = shard(Layout(2, 1), "fcdp")
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
    model.head.weight = nn.Parameter(
        distribute_tensor(torch.zeros(VOCABULARY, WIDTH), other, [Shard(1)])
    )
    with pytest.raises(ValueError, match=r"^head\.weight: is a DTensor on mesh"):
        fcdp.shard(model, topology, units=model.blocks)
    hybrid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("r", "s", "tp"))["r", "s"]
    data, tensor = divmod(dist.get_rank(), TENSOR)
    beside, ours = [TENSOR * data, TENSOR * data + 1], [tensor, tensor + TENSOR]
    for mesh, message in (
        (hybrid, "2 dimensions ('r', 's') that replicates"),
        (mesh_of(2)["tp"], f"over ranks {beside}; must be those of the topology, {ours}"),
    ):
        plain = nn.Linear(4, 4)
        fully_shard(plain, mesh=mesh)
        with pytest.raises(ValueError, match=re.escape(message)):
            fcdp.cache_parameters(plain, topology)
