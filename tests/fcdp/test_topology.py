"""Places of ranks, refusals, and what the groups cost each process."""

import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcdp
from fcdp import topology as module
from fcdp.exchange import any_rank
from tests.fcdp.training import topology_of
from tests.ranks import Pools, RankPool, on_ranks


@on_ranks(2)
def test_a_shape_that_is_not_the_world_is_refused() -> None:
    shapes: list[tuple[Any, Any]] = [(3, 1), (0, 2), (-1, -2), (2, 2), ("2", 1), (2, 1.0)]
    for nodes, ranks_per_node in shapes:
        with pytest.raises(ValueError, match="nodes × ranks_per_node.*world size, 2") as error:
            fcdp.Topology.build(nodes, ranks_per_node, "cpu")
        assert f"{nodes!r} × {ranks_per_node!r}" in str(error.value)


@on_ranks(2)
def test_there_may_be_one_node_or_one_rank_on_each() -> None:
    for shape in ((1, 2), (2, 1)):
        topology = topology_of(*shape)
        assert (topology.nodes, topology.ranks_per_node) == shape


@on_ranks(2)
def test_new_groups_have_names_that_torch_gives_no_others() -> None:
    """Their members alone make them, and torch names groups by how many it has counted."""
    world, counts = dist.distributed_c10d._world, []
    before = world.group_count

    def make(*_: Any, use_local_synchronization: bool, **__: Any) -> Any:
        assert use_local_synchronization
        counts.append(world.group_count)
        world.group_count += 1
        return mock.Mock(spec=dist.ProcessGroup)

    with mock.patch.object(dist, "new_group", make):
        for _ in range(2):
            module.new_group([0, 1], "gloo", use="gather")
    assert len({*counts}) == 2
    assert min(counts) > 2**20
    assert world.group_count == before


@on_ranks(2)
def test_ranks_that_would_name_a_group_differently_are_refused_together() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    name = str(dist.get_rank())
    names = mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", return_value=name)
    with names, pytest.raises(ValueError, match="would give one process group different names"):
        fcdp.Topology.of_mesh(mesh, 1)


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


def initialise(
    device_type: str | None, devices: int = 2, device: int = 1, **variables: str
) -> tuple[str, str | None]:
    """Return the backend of the default group, and whether gloo connects lazily then.

    A rank of a node with so many devices calls it, which is to use ``device`` of these.
    """
    made: list[tuple[str, str | None]] = []
    before = os.environ.get("TORCH_GLOO_LAZY_INIT")

    def init_process_group(backend: str) -> None:
        made.append((backend, os.environ.get("TORCH_GLOO_LAZY_INIT")))

    with mock.patch.dict(os.environ, variables):
        with (
            mock.patch.object(dist, "is_initialized", return_value=False),
            mock.patch.object(dist, "init_process_group", init_process_group),
            mock.patch.object(dist, "get_world_size", return_value=2),
            mock.patch.object(torch.accelerator, "set_device_index") as set_device,
            mock.patch.object(torch.accelerator, "device_count", return_value=devices),
            mock.patch("fcdp.topology.init_device_mesh"),
            pytest.raises(ValueError, match="nodes × ranks_per_node"),
        ):
            fcdp.Topology.build(0, 0, device_type)
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == before
    bound = [] if made[0][0] == "gloo" else [mock.call(device)]
    assert set_device.call_args_list == bound
    return made[0]


def test_beside_an_accelerator_gloo_connects_the_world_lazily() -> None:
    assert initialise("cuda", LOCAL_RANK="1") == ("cpu:gloo,cuda:nccl", "1")
    assert initialise("cpu") == ("gloo", None)


def test_ranks_share_a_device_where_there_are_fewer() -> None:
    for devices in (0, 1):
        initialise("cuda", devices, device=0, LOCAL_RANK="1")


def test_a_rank_that_no_launcher_numbers_has_the_first_device() -> None:
    initialise("cuda", device=0)


@pytest.mark.parametrize(
    ("accelerator", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), (None, "gloo")]
)
def test_by_default_ranks_are_on_the_accelerator_that_is_there(
    accelerator: str | None, backend: str
) -> None:
    """A torch for another one may be installed on a machine without any."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        name = accelerator if check_available else "xpu"
        return None if name is None else torch.device(name)

    with mock.patch.object(torch.accelerator, "current_accelerator", current_accelerator):
        assert initialise(None, LOCAL_RANK="1")[0] == backend


def test_the_user_decides_whether_gloo_connects_lazily() -> None:
    with mock.patch.dict(os.environ, TORCH_GLOO_LAZY_INIT="0"):
        assert initialise("cuda", LOCAL_RANK="1") == ("cpu:gloo,cuda:nccl", "0")


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
    def refused(mesh: DeviceMesh, ranks_per_node: Any, why: str) -> None:
        with pytest.raises(ValueError, match=re.escape(why)):
            fcdp.Topology.of_mesh(mesh, ranks_per_node)

    rank, pair = dist.get_rank(), DeviceMesh("cpu", [0, 1])
    elsewhere = DeviceMesh("cpu", [1 - rank], _init_backend=False)
    refused(grid(2, 1), 1, "has 2 dimensions ('dp', 'tp')")
    refused(DeviceMesh("cpu", [1, 0]), 1, "[1, 0] do not ascend")
    refused(elsewhere, 1, "is not among its ranks")
    refused(world_as("xpu"), 1, "'xpu' has no backend")
    for size in (3, 0, -1, 1.0, "2"):
        must = "must be a whole number, 1 or more, that divides the mesh's 2 ranks"
        refused(pair, size, f"ranks_per_node = {size!r}: {must}")
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


def placed(nodes: int, ranks_per_node: int, rank: int = 0, **parts: Any) -> fcdp.Topology:
    """A topology whose groups are stand-ins."""
    uses = ("intra", "inter", "reduce_intra", "reduce_inter", "control_intra", "control_inter")
    groups = {use: mock.Mock(group_name=use) for use in uses}
    mesh = SimpleNamespace(device_type="cpu", get_group=lambda: world)
    world = mock.Mock(group_name="all")
    return fcdp.Topology(nodes, ranks_per_node, rank, **{"mesh": mesh, **groups, **parts})


def groups_of(topology: fcdp.Topology) -> set[Any]:
    gathers = {topology.mesh.get_group(), topology.intra, topology.inter}
    reductions = {topology.reduce_intra, topology.reduce_inter}
    return gathers | reductions | {topology.control_intra, topology.control_inter}


def test_a_repr_says_where_a_rank_is() -> None:
    wide, long = placed(1, 3, 2), placed(2, 1, 1)
    assert repr(wide) == "Topology(1 node × 3 ranks, rank 2 = node 0, local rank 2, cpu)"
    assert repr(long) == "Topology(2 nodes × 1 rank, rank 1 = node 1, local rank 0, cpu)"


@pytest.mark.parametrize(
    ("shape", "local_world_size", "processes"),
    [((2, 2), "8", 2), ((2, 1), "2", 2), ((2, 1), None, 1), ((1, 2), "1", 2)],
    ids=str,
)
def test_processes_of_a_node_are_those_of_all_dimensions(
    shape: tuple[int, int], local_world_size: str | None, processes: int
) -> None:
    """The world has four ranks: where a topology has all of them, nodes may be emulated."""
    variables = {} if local_world_size is None else {"LOCAL_WORLD_SIZE": local_world_size}
    with (
        mock.patch.object(dist, "get_world_size", return_value=4),
        mock.patch.dict(os.environ, variables),
    ):
        assert placed(*shape).processes_per_node == processes


def test_failures_end_waits_in_all_groups_those_of_a_part_too() -> None:
    whole = placed(2, 2)
    part = placed(2, 1, whole=whole)
    with mock.patch("fcdp.topology.Failures") as made:
        assert part.failures is whole.failures is made.return_value
        other = placed(2, 2, mesh=whole.mesh)
        assert other.failures is made.return_value
    (name, groups), (another, _) = (call.args for call in made.call_args_list)
    assert name != another
    assert ({*groups}, len(groups)) == (groups_of(whole), 7)
    ((covered,),) = (call.args for call in made.return_value.cover.call_args_list)
    assert {*covered} == groups_of(part)


def test_exchanges_of_a_part_are_counted_apart() -> None:
    whole = placed(2, 2)
    part = placed(2, 1, whole=whole)
    with mock.patch("fcdp.topology.Failures") as made:
        assert whole.exchanges is made.return_value.exchanges
        assert part.exchanges is made.return_value.part.return_value
    made.return_value.part.assert_called_once_with("all", 2)


@pytest.mark.parametrize(
    ("root", "members", "beside"),
    [("same", [0, 1], True), ("other", [0, 1], False), ("same", [0, 2], False)],
    ids=str,
)
def test_a_mesh_is_beside_one_that_it_shares_this_rank_and_a_root_with(
    root: str, members: list[int], beside: bool
) -> None:
    def mesh(ranks: list[int], root: str) -> Any:
        return SimpleNamespace(mesh=torch.tensor(ranks), _get_root_mesh=lambda: root)

    topology = placed(2, 1, mesh=mesh([0, 2], "same"))
    with mock.patch.object(dist, "get_rank", return_value=0):
        assert topology.is_beside(mesh(members, root)) == beside


@pytest.mark.parametrize(
    ("ranks_per_node", "members", "shape"),
    [
        (2, [0, 1, 2, 3], (2, 2)),
        (2, [0, 2], (2, 1)),
        (2, [2, 3], (1, 2)),
        (2, [3], (1, 1)),
        (2, [0, 1, 2], None),
        (2, [2, 0], None),
        (2, [0, 4], None),
        (1, [1, 3], (2, 1)),
    ],
    ids=str,
)
def test_nodes_of_a_part_are_those_of_the_whole(
    ranks_per_node: int, members: list[int], shape: tuple[int, int] | None
) -> None:
    mesh = SimpleNamespace(mesh=torch.arange(4))
    whole: Any = SimpleNamespace(mesh=mesh, ranks_per_node=ranks_per_node)
    assert fcdp.Topology.shape_of(whole, members) == shape


def test_a_part_is_made_once_for_all_meshes_over_its_ranks() -> None:
    """By the ranks that it has on each of the nodes."""
    members: list[Any] = [SimpleNamespace(mesh=torch.tensor([0, 2, 4])) for _ in range(2)]
    whole = placed(4, 2, mesh=SimpleNamespace(mesh=torch.arange(8)))
    with mock.patch.object(fcdp.Topology, "of_mesh", return_value=placed(3, 1)) as of_mesh:
        first, second = map(whole.part, members)
    of_mesh.assert_called_once_with(members[0], 1)
    assert first is second
    assert first.whole is whole


def test_of_many_ranks_a_refusal_says_some() -> None:
    shown = [module._shortened(range(count)) for count in (2, 8, 9, 20)]
    assert shown[:2] == ["[0, 1]", "[0, 1, 2, 3, 4, 5, 6, 7]"]
    assert shown[2:] == [f"[0, 1, 2, 3, 4, 5, 6, 7, … {last}]" for last in (8, 19)]


@pytest.mark.parametrize(("local_ranks", "size"), [([0, None], 2), ([0, 1], None)])
def test_both_variables_of_a_launcher_are_needed(
    local_ranks: list[int | None], size: int | None
) -> None:
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE or LOCAL_RANK not set"):
        module._launched_ranks_per_node([0, 1], local_ranks, {2, size})


@on_ranks(2)
def test_groups_wait_as_long_as_the_most_patient_backend_of_their_mesh() -> None:
    backends: list[Any] = [
        SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=seconds)))
        for seconds in (30, 50, 40)
    ]
    with mock.patch("fcdp.topology.backends_of", return_value=[object(), *backends]):
        topology = fcdp.Topology.of_mesh(DeviceMesh("cpu", [0, 1]), 1)
    assert waits(topology.intra) == 50


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
