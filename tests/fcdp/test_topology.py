"""Places of ranks, refusals, and what the groups cost each process."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcdp
from fcdp.exchange import any_rank
from tests.fcdp.training import topology_of
from tests.ranks import Pools, RankPool, on_ranks


@on_ranks(2)
def test_a_shape_that_is_not_the_world_is_refused() -> None:
    shapes: list[tuple[Any, int]] = [(3, 1), (0, 2), (-1, -2), (2, 2), ("2", 1)]
    for nodes, ranks_per_node in shapes:
        with pytest.raises(ValueError, match="nodes × ranks_per_node.*world size, 2") as error:
            fcdp.Topology.build(nodes, ranks_per_node, "cpu")
        assert f"{nodes!r} × {ranks_per_node}" in str(error.value)


@on_ranks(6)
def test_ranks_are_numbered_node_by_node() -> None:
    """Numbers are divided by the ranks of a node, not by the number of nodes."""
    topology, rank = topology_of(2, 3), dist.get_rank()
    node, local_rank = divmod(rank, 3)
    assert (topology.rank, topology.node, topology.local_rank) == (rank, node, local_rank)
    intra, inter = map(dist.get_process_group_ranks, (topology.intra, topology.inter))
    assert intra == [3 * node, 3 * node + 1, 3 * node + 2]
    assert inter == [local_rank, 3 + local_rank]


@on_ranks(4)
def test_on_the_cpu_no_group_is_made_twice_and_all_wait_as_long_as_that_of_the_world() -> None:
    topology = topology_of(2, 2)
    assert topology.reduce_intra is topology.control_intra is topology.intra
    assert topology.reduce_inter is topology.control_inter is topology.inter
    assert {waits(group) for group in (topology.intra, topology.inter)} == {WORLD_WAITS_S}


#: As long as the pool's world, not torch's half an hour.
WORLD_WAITS_S = 200


def waits(group: dist.ProcessGroup) -> float:
    """Seconds until a group gives a silent rank up."""
    backend: Any = group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())


def world_as(device_type: str) -> DeviceMesh:
    """All ranks as devices that are not there."""
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, device_type)


@on_ranks(4)
def test_on_an_accelerator_reductions_and_the_host_have_groups_of_their_own() -> None:
    """None of them is over all ranks. Gloo stands in for NCCL: it says that it serves CUDA too."""
    before = len(dist.distributed_c10d._world.pg_names)
    mesh = world_as("cuda")
    topology = fcdp.Topology.of_mesh(mesh, 2)
    names = [f"{use}{way}" for use in ("", "reduce_", "control_") for way in ("intra", "inter")]
    groups = {name: getattr(topology, name) for name in names}
    assert len({id(group) for group in groups.values()}) == 6
    assert len(dist.distributed_c10d._world.pg_names) == before + 6
    for name, group in groups.items():
        expected = {"intra": topology.intra, "inter": topology.inter}[name.split("_")[-1]]
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(expected)
    assert dist.get_backend(topology.control_intra) == "gloo"
    assert any_rank([topology.rank == 3, False], topology) == [True, False]
    assert {group.size() for group in groups.values()} == {2}
    assert set(map(waits, groups.values())) == {WORLD_WAITS_S}


@on_ranks(2)
def test_the_groups_of_the_mesh_serve_gathers_where_they_have_the_ranks() -> None:
    mesh = world_as("cuda")
    topology = fcdp.Topology.of_mesh(mesh, 2)
    assert topology.intra is mesh.get_group()
    assert topology.reduce_intra is not topology.intra


def initialise(device_type: str, devices: int = 2) -> tuple[str, str | None]:
    """Return the backend of the default group, and whether gloo connects lazily then.

    The second rank of a node with so many devices calls it.
    """
    made: list[tuple[str, str | None]] = []
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")

    def init_process_group(backend: str) -> None:
        made.append((backend, os.environ.get("TORCH_GLOO_LAZY_INIT")))

    with (
        mock.patch.object(dist, "is_initialized", return_value=False),
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(torch.accelerator, "set_device_index") as set_device,
        mock.patch.object(torch.accelerator, "device_count", return_value=devices),
        mock.patch("fcdp.topology.init_device_mesh"),
        mock.patch.dict(os.environ, LOCAL_RANK="1"),
        pytest.raises(ValueError, match="nodes × ranks_per_node"),
    ):
        fcdp.Topology.build(0, 0, device_type)
    bound = [] if device_type == "cpu" else [mock.call(1 if devices > 1 else 0)]
    assert set_device.call_args_list == bound
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == before
    return made[0]


def test_beside_an_accelerator_gloo_connects_the_world_lazily() -> None:
    assert initialise("cuda") == ("cpu:gloo,cuda:nccl", "1")
    assert initialise("cpu") == ("gloo", None)


def test_ranks_share_a_device_where_there_are_fewer() -> None:
    initialise("cuda", devices=1)


def test_the_user_decides_whether_gloo_connects_lazily() -> None:
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="0"):
        assert initialise("cuda") == ("cpu:gloo,cuda:nccl", "0")


def launched(local_rank: int, local_world_size: int) -> Any:
    """Within, the environment that torchrun sets."""
    variables = {
        "RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
    }
    return mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()})


def shape_or_error(make: Callable[[], fcdp.Topology]) -> tuple[int, int] | str:
    try:
        topology = make()
    except ValueError as error:
        return str(error)
    return topology.nodes, topology.ranks_per_node


def from_env(local: dict[int, tuple[int, int]]) -> tuple[int, int] | str:
    """``local``: rank → (local rank, local world size)."""
    with launched(*local[dist.get_rank()]):
        return shape_or_error(lambda: fcdp.Topology.from_env("cpu"))


@pytest.mark.parametrize(
    ("local", "answer"),
    [
        ({0: (0, 1), 1: (0, 1)}, "(2, 1)"),
        (
            {0: (0, 2), 1: (1, 2), 2: (0, 1)},
            "LOCAL_WORLD_SIZE: nodes run 1 and 2 ranks; every node must run the same number: "
            "start 1 on each (torchrun --nproc-per-node 1)",
        ),
        ({0: (1, 2), 1: (0, 2)}, "rank 0 has local rank 1"),
    ],
)
def test_the_launcher_environment_is_read_or_refused_on_every_rank(
    ranks: Pools, local: dict[int, tuple[int, int]], answer: str
) -> None:
    assert all(answer in str(outcome) for outcome in ranks.run(len(local), from_env, local))


def test_a_missing_launcher_is_named() -> None:
    with (
        mock.patch.dict(os.environ, {"RANK": "0"}, clear=True),
        pytest.raises(ValueError, match="WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE not set"),
    ):
        fcdp.Topology.from_env("cpu")


def grid(data: int, tensor: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


@on_ranks(8)
def test_a_dimension_of_a_mesh_has_a_topology_of_its_own() -> None:
    """Ranks 0, 2 | 4, 6 hold one tensor-parallel half, ranks 1, 3 | 5, 7 the other."""
    mesh = grid(4, 2)["dp"]
    topology = fcdp.Topology.of_mesh(mesh, 2)
    data, half = divmod(dist.get_rank(), 2)
    node, local_rank = divmod(data, 2)
    assert topology.mesh is mesh
    assert (topology.nodes, topology.rank) == (2, data)
    assert (topology.node, topology.local_rank) == (node, local_rank)
    intra, inter = map(dist.get_process_group_ranks, (topology.intra, topology.inter))
    assert intra == [4 * node + half, 4 * node + 2 + half], intra
    assert inter == [2 * local_rank + half, 4 + 2 * local_rank + half], inter
    assert any_rank([topology.rank == 0], topology) == [True]


def sub_mesh_by_env(*local_world_sizes: int) -> list[tuple[int, int] | str]:
    mesh, shapes = grid(dist.get_world_size() // 2, 2)["dp"], []
    for size in local_world_sizes:
        with launched(dist.get_rank() % size, size):
            shapes.append(shape_or_error(lambda: fcdp.Topology.of_mesh(mesh)))
    return shapes


def test_the_launcher_tells_how_many_of_a_mesh_share_a_node(ranks: Pools) -> None:
    assert ranks.run(8, sub_mesh_by_env, 1, 2, 4, 8) == [[(4, 1), (4, 1), (2, 2), (1, 4)]] * 8


def test_a_mesh_that_lies_unevenly_on_nodes_is_refused_on_every_rank(ranks: Pools) -> None:
    answers = ranks.run(6, sub_mesh_by_env, 4)
    assert all("2 on node 0, 1 on node 1" in str(answer) for answer in answers)
    assert all("ranks [0, 2, 4]" in str(answer) for answer in answers[::2])


@on_ranks(4)
def test_a_flattened_dimension_has_a_topology() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]._flatten("dp")
    assert shape_or_error(lambda: fcdp.Topology.of_mesh(data, 2)) == (2, 2)


@on_ranks(2)
def test_an_unusable_mesh_is_refused_on_every_rank() -> None:
    def refused(mesh: DeviceMesh, ranks_per_node: int, why: str) -> None:
        with pytest.raises(ValueError, match=re.escape(why)):
            fcdp.Topology.of_mesh(mesh, ranks_per_node)

    rank, pair = dist.get_rank(), DeviceMesh("cpu", [0, 1])
    elsewhere = DeviceMesh("cpu", [1 - rank], _init_backend=False)
    refused(grid(2, 1), 1, "has 2 dimensions ('dp', 'tp')")
    refused(DeviceMesh("cpu", [1, 0]), 1, "[1, 0] do not ascend")
    refused(elsewhere, 1, "is not among its ranks")
    refused(world_as("xpu"), 1, "'xpu' has no backend")
    refused(pair, 3, "ranks_per_node = 3: must be positive and divide the mesh's 2 ranks")
    refused(pair, 1 + rank, "ranks differ, {1, 2}")


@pytest.mark.parametrize("ended", [False, True])
@on_ranks(4)
def test_where_a_rank_made_a_group_alone_all_ranks_have_a_topology_or_none(ended: bool) -> None:
    """Up to torch 2.13 the names of the next groups depend on that group while it lives."""
    mesh = DeviceMesh("cpu", list(range(4)))
    if dist.get_rank() == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        if ended:
            dist.destroy_process_group(group)
    answers = [""] * 4
    dist.all_gather_object(answers, str(shape_or_error(lambda: fcdp.Topology.of_mesh(mesh, 2))))
    assert len({*answers}) == 1
    assert answers[0] == "(2, 2)" or "would give one process group different names" in answers[0]
    assert answers[0] == "(2, 2)" or not ended


@on_ranks(4)
def test_after_a_topology_of_some_ranks_all_ranks_make_groups_together() -> None:
    """From 2.14 on torch names those groups after all that a rank made before."""
    data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "dp"))["dp"]
    if dist.get_rank() < 2:
        topology = fcdp.Topology.of_mesh(data, 1)
        assert dist.get_process_group_ranks(topology.intra) == [dist.get_rank()]
    dist.barrier(dist.new_group([0, 1, 2, 3]))


@on_ranks(2)
def test_nodes_that_nobody_tells_are_asked_for_on_every_rank() -> None:
    """Rank 0 knows."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    with mock.patch.dict(os.environ, {} if dist.get_rank() else dict.fromkeys(names, "1")):
        assert "ranks_per_node" in str(
            shape_or_error(lambda: fcdp.Topology.of_mesh(DeviceMesh("cpu", [0, 1])))
        )


NODES, RANKS_PER_NODE = 4, 3
PEERS = (RANKS_PER_NODE - 1) + (NODES - 1)


def sockets() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


#: This rank's number of sockets before it made its topology, and the topology.
MADE: list[tuple[int, fcdp.Topology]] = []


def join_as_on_an_accelerator(rank: int, world_size: int, store: Path) -> None:
    """Build a topology; gloo stands for the accelerator's own backend."""
    before = sockets()
    init = functools.partial(
        dist.init_process_group, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    with (
        mock.patch.object(torch.accelerator, "set_device_index"),
        mock.patch.object(dist, "get_default_backend_for_device", return_value="gloo"),
        mock.patch.object(dist, "init_process_group", init),
    ):
        MADE.append((before, fcdp.Topology.build(NODES, RANKS_PER_NODE, "cuda")))


def taken() -> tuple[int, int]:
    """Sockets that the topology takes as it is built, and once it has been used."""
    [(before, topology)] = MADE
    built = sockets() - before
    assert any_rank([topology.rank == 5], topology) == [True]
    dist.all_gather_object([None] * topology.world_size, topology.rank)
    return built, sockets() - before


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts by /proc")
def test_connections_grow_with_the_neighbours_not_with_the_world() -> None:
    """Gathers, reductions and the host have groups with neighbours; 12 ranks have 11 others."""
    pool = RankPool(NODES * RANKS_PER_NODE, join_as_on_an_accelerator)
    try:
        sockets = pool.run(taken)
    finally:
        pool.close()
    # Each group has a socket that listens; the world adds neighbours on its ring.
    listening = 7
    assert max(map(max, sockets)) <= 3 * PEERS + listening + 2
