"""Nodes × ranks per node, and the process groups along both directions."""

from __future__ import annotations

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fcdp.failure import Exchanges, Failures, backends_of

#: Makes gloo connect two ranks when they first exchange something.
_LAZY = "TORCH_GLOO_LAZY_INIT"
#: Counts topologies, alike on all ranks that share one.
_serial = itertools.count()
#: How many groups `new_group` has made of the same ranks, by the world that they are ranks of.
_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
#: More groups than torch counts in a process.
_BEYOND = 2**32


@dataclass(frozen=True, eq=False)
class Topology:
    """The place of every rank, built once and shared by all units.

    Ranks are numbered node by node, as torchrun does: ``rank = node · L + local_rank`` with
    ``L = ranks_per_node``. Make one with ``from_env`` or ``build`` for all ranks of the world,
    with ``of_mesh`` for the data-parallel dimension of a mesh of several.

    Example:
        >>> topology.nodes, topology.ranks_per_node, topology.world_size
        (2, 1, 2)
    """

    nodes: int
    ranks_per_node: int
    #: Place among the data-parallel ranks; the global rank where these are the world.
    rank: int
    _: KW_ONLY
    #: 1-D mesh over the data-parallel ranks: what ``fully_shard`` shards over.
    mesh: DeviceMesh
    #: The data-parallel ranks of this node, for gathers.
    intra: dist.ProcessGroup
    #: The data-parallel ranks with this ``local_rank``, one per node, for gathers.
    inter: dist.ProcessGroup
    #: The same ranks for reductions: on accelerators communicators of their own, so that no gather
    #: queues behind a reduction; on the CPU the groups of the gathers, as groups cost sockets.
    reduce_intra: dist.ProcessGroup
    reduce_inter: dist.ProcessGroup
    #: The same ranks for decisions taken on the host, by gloo.
    control_intra: dist.ProcessGroup
    control_inter: dist.ProcessGroup
    #: The topology that this one is a ``part`` of, whose ranks decide together; else ``None``.
    whole: Topology | None = None

    def __repr__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        ranks = f"{self.ranks_per_node} rank{'s' * (self.ranks_per_node != 1)}"
        here = f"rank {self.rank} = node {self.node}, local rank {self.local_rank}"
        return f"Topology({nodes} × {ranks}, {here}, {self.mesh.device_type})"

    @functools.cached_property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.nodes * self.ranks_per_node

    @functools.cached_property
    def node(self) -> int:
        """The node of this rank, from 0."""
        return self.rank // self.ranks_per_node

    @functools.cached_property
    def local_rank(self) -> int:
        """The place of this rank among those of its node, from 0."""
        return self.rank % self.ranks_per_node

    @property
    def processes_per_node(self) -> int:
        """Ranks on this node, of all mesh dimensions where ``LOCAL_WORLD_SIZE`` is set."""
        if self.world_size == dist.get_world_size():
            return self.ranks_per_node
        return max(self.ranks_per_node, _variable("LOCAL_WORLD_SIZE") or 0)

    @functools.cached_property
    def failures(self) -> Failures:
        """Failures that ranks report to each other; all must first read this at the same point.

        Those of a part are the whole's, which ends waits in the part's groups too.
        """
        groups = [self.mesh.get_group(), self.intra, self.inter, self.reduce_intra]
        groups += [self.reduce_inter, self.control_intra, self.control_inter]
        if self.whole is not None:
            self.whole.failures.cover(groups)
            return self.whole.failures
        name = f"{self.mesh.get_group().group_name}/{next(_serial)}"
        return Failures(name, list(dict.fromkeys(groups)))

    @functools.cached_property
    def exchanges(self) -> Exchanges:
        """The exchanges of these ranks; those of a part are counted apart from the whole's."""
        if self.whole is None:
            return self.failures.exchanges
        return self.failures.part(self.mesh.get_group().group_name, self.world_size)

    def shape_of(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Nodes, and ranks on each, of some of these ranks, by their global numbers.

        ``None`` if others are among them, they do not ascend, or nodes hold unequal numbers.
        """
        places = {rank: place for place, rank in enumerate(self.mesh.mesh.tolist())}
        if not places.keys() >= {*ranks} or [*ranks] != sorted(ranks):
            return None
        shares = Counter(places[rank] // self.ranks_per_node for rank in ranks)
        size, *others = {*shares.values()}
        return None if others else (len(shares), size)

    def part(self, mesh: DeviceMesh) -> Topology:
        """The topology of a 1-D mesh over some of these ranks, as experts are sharded over one.

        Nodes are those of this topology. Made once for all meshes over the same ranks, as its
        process groups live as long as the process. Collective: each of this topology's ranks calls
        it for its own mesh, whose ``shape_of`` is the same on all of them.
        """
        ranks = tuple(mesh.mesh.tolist())
        if ranks not in self._parts:
            shape = self.shape_of(ranks)
            assert shape is not None, f"{mesh}: not a part of {self}"
            self._parts[ranks] = replace(Topology.of_mesh(mesh, shape[1]), whole=self)
        return self._parts[ranks]

    @functools.cached_property
    def _parts(self) -> dict[tuple[int, ...], Topology]:
        """The parts that were made, by their global ranks."""
        return {}

    def is_beside(self, mesh: DeviceMesh) -> bool:
        """Whether ``mesh`` spans other dimensions of this topology's root mesh (such as TP's).

        FSDP2 shards over ``self.mesh`` what is distributed over such a mesh already.
        """
        shared = set(self.mesh.mesh.flatten().tolist()) & set(mesh.mesh.flatten().tolist())
        return mesh._get_root_mesh() == self.mesh._get_root_mesh() and shared == {dist.get_rank()}

    @classmethod
    def from_env(cls, device_type: str | None = None) -> Topology:
        """Read the topology from what torchrun sets, and check it on all ranks.

        Initialises the default process group if nobody has.

        Args:
            device_type: Such as ``"cuda"``; by default this machine's accelerator, or the CPU.

        Returns:
            The topology of all ranks of the world.

        Raises:
            ValueError: On every rank if the nodes run unequal numbers of ranks or ranks are not
                numbered node by node; without torchrun's environment.

        Example:
            >>> fcdp.Topology.from_env()  # without torchrun
            Traceback (most recent call last):
            ValueError: environment: ... not set; start the program with torchrun, or ...
        """
        missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"environment: {', '.join(missing)} not set; start the program with torchrun, "
                "or describe the cluster with Topology.build(nodes, ranks_per_node)"
            )
        return cls.of_mesh(_world_mesh(device_type))

    @classmethod
    def build(cls, nodes: int, ranks_per_node: int, device_type: str | None = None) -> Topology:
        """Lay ``nodes × ranks_per_node`` over the default process group.

        Collective: every rank calls it once, with the same arguments. Nodes may be emulated, as
        several on one host.

        Args:
            nodes: How many.
            ranks_per_node: Ranks of each.
            device_type: Such as ``"cuda"``; by default this machine's accelerator, or the CPU.

        Returns:
            The topology of all ranks of the world.

        Raises:
            ValueError: If they are not positive with the world size as product.

        Example:
            >>> topology = fcdp.Topology.build(nodes=1, ranks_per_node=2)
            >>> topology.world_size, topology.node
            (2, 0)
        """
        mesh = _world_mesh(device_type)
        numbers = isinstance(nodes, int) and isinstance(ranks_per_node, int)
        if not numbers or nodes < 1 or nodes * ranks_per_node != mesh.size():
            raise ValueError(
                f"nodes × ranks_per_node = {nodes!r} × {ranks_per_node!r}: "
                f"must be whole numbers, 1 or more, that multiply to the world size, {mesh.size()}"
            )
        return cls.of_mesh(mesh, ranks_per_node)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, ranks_per_node: int | None = None) -> Topology:
        """The topology of one dimension of a mesh, as ``mesh["dp"]`` beside tensor parallelism.

        Ranks of one node may hold different tensor-parallel shards: each sub-mesh has a topology of
        its own. Collective over the mesh: all its ranks call it, once, with equal arguments; and so
        does every other rank for its mesh where the default group is bound to a ``device_id``.

        Args:
            mesh: 1-D, its global ranks ascending.
            ranks_per_node: How many of the mesh's ranks, in its order, share a node; by default it
                follows from torchrun's environment. Nodes may be emulated by a smaller number.

        Returns:
            The topology of the mesh's ranks.

        Raises:
            ValueError: On every rank of the mesh if it is not 1-D, its ranks do not ascend or lie
                unevenly on nodes, ``ranks_per_node`` does not divide them, its device type has no
                backend in the default process group, or the environment does not tell the nodes.

        Example:
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
            >>> fcdp.Topology.of_mesh(mesh["dp"], ranks_per_node=1).nodes
            2
        """
        ranks = _ranks_of(mesh)
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        if mesh.device_type not in backends:
            raise ValueError(
                f"mesh: device type {mesh.device_type!r} has no backend in the default process "
                f"group, which has {', '.join(backends)}; initialise it with one, such as "
                "torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
            )
        size = _agreed_ranks_per_node(mesh, ranks, ranks_per_node)
        rank = mesh.get_local_rank()
        first = rank // size * size
        members = (ranks[first : first + size], ranks[rank % size :: size])
        backend = backends[mesh.device_type]
        # Groups wait for a silent rank as long as the mesh's own, set by the user: by default
        # a new group would for half an hour, or ten minutes with NCCL.
        options = [getattr(each, "options", None) for each in backends_of(mesh.get_group())]
        time_out = max((each._timeout for each in options if each is not None), default=None)
        gathers = [
            mesh.get_group()
            if own == ranks
            else new_group(own, backend, use="gather", time_out=time_out)
            for own in members
        ]
        reductions = controls = gathers
        if mesh.device_type != "cpu":
            reductions = [
                new_group(own, backend, use="reduce", time_out=time_out) for own in members
            ]
            # Not the world, where each process would connect to every other one.
            host = backends.get("cpu", "gloo")
            controls = [new_group(own, host, use="control", time_out=time_out) for own in members]
        return cls(
            len(ranks) // size,
            size,
            rank,
            mesh=mesh,
            intra=gathers[0],
            inter=gathers[1],
            reduce_intra=reductions[0],
            reduce_inter=reductions[1],
            control_intra=controls[0],
            control_inter=controls[1],
        )


def new_group(
    members: Sequence[int], backend: str, *, use: str, time_out: timedelta | None = None
) -> dist.ProcessGroup:
    """A new group, made by its members alone.

    Groups of the world are made by calls of all ranks for each of them, 64 + 8 on 64 × 8, and
    where the default group is bound to a device (``device_id``) each call splits its communicator.
    """
    assert dist.group.WORLD is not None
    made = _made.setdefault(dist.group.WORLD, Counter())
    with _groups_counted_as(_BEYOND + made[tuple(members)]):
        group = dist.new_group(
            members,
            timeout=time_out,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"fcdp_{use}",
        )
    made[tuple(members)] += 1
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def _groups_counted_as(count: int) -> Iterator[None]:
    """Let torch name groups as if it had counted ``count``, and count none of those made inside.

    From torch 2.14 on it counts the groups that some ranks make alone, and names after the count
    those that all ranks make next: these would wait for each other in groups of several names.
    """
    world = dist.distributed_c10d._world
    before = world.group_count
    world.group_count = count
    try:
        yield
    finally:
        world.group_count = before


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _world_mesh(device_type: str | None) -> DeviceMesh:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    if not dist.is_initialized() and device_type == "cpu":
        dist.init_process_group("gloo")
    elif not dist.is_initialized():
        # Before the first collective: NCCL binds a rank to the device that is current then. Ranks
        # of emulated nodes may share one.
        devices = max(1, torch.accelerator.device_count())
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)) % devices)
        # Gloo too: with offloaded parameters clip_grad_norm_ reduces CPU tensors over the mesh.
        backend = dist.get_default_backend_for_device(device_type)
        # It serves rare collectives along a ring or a tree: of 512 ranks each would hold 511
        # sockets, and set-up would wait for 130,816 connections. The user's word counts.
        theirs = os.environ.get(_LAZY)
        os.environ[_LAZY] = theirs or "1"
        try:
            dist.init_process_group(f"cpu:gloo,{device_type}:{backend}")
        finally:
            if theirs is None:
                del os.environ[_LAZY]
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    """The mesh's global ranks. Raises ``ValueError`` for a mesh that no topology fits."""
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.shape)}; must "
            "be the one that parameters are sharded over, such as mesh['dp']"
        )
    ranks: list[int] = mesh.mesh.tolist()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh: rank {dist.get_rank()} is not among its ranks {_shortened(ranks)}; only those "
            "build its topology"
        )
    if ranks != sorted(ranks):
        raise ValueError(
            f"mesh: its ranks {_shortened(ranks)} do not ascend, as those of its process group do"
        )
    return ranks


def _shortened(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"[{shown}, … {ranks[-1]}]" if len(ranks) > 8 else f"[{shown}]"


def _agreed_ranks_per_node(mesh: DeviceMesh, ranks: Sequence[int], asked: int | None) -> int:
    """How many of the mesh's ranks share a node.

    Raises the same ``ValueError`` on every rank, so that none waits for one that has left.
    """
    # Up to torch 2.13 the next group's name depends on how many groups each rank is a member of.
    with _groups_counted_as(_BEYOND):
        name = dist.distributed_c10d._hash_ranks_to_str([*ranks])
    mine = asked, _variable("LOCAL_RANK"), _variable("LOCAL_WORLD_SIZE"), name
    facts: list[Any] = [None] * len(ranks)
    dist.all_gather_object(facts, mine, group=mesh.get_group())
    requested, local_ranks, sizes, names = zip(*facts, strict=True)
    answers = {*requested}
    if len({*names}) > 1:
        raise ValueError(
            f"mesh: its ranks {_shortened(ranks)} would give one process group different names, as "
            "only some of them are in groups made before; build the topology before those groups"
        )
    if len(answers) > 1:
        raise ValueError(f"ranks_per_node = {asked}: ranks differ, {answers}; must be equal")
    if asked is None:
        return _launched_ranks_per_node(ranks, local_ranks, {*sizes})
    if not isinstance(asked, int) or asked < 1 or len(ranks) % asked:
        raise ValueError(
            f"ranks_per_node = {asked!r}: must be a whole number, 1 or more, that divides the "
            f"mesh's {len(ranks)} ranks"
        )
    return asked


def _variable(name: str) -> int | None:
    return int(os.environ[name]) if name in os.environ else None


def _launched_ranks_per_node(
    ranks: Sequence[int], local_ranks: Sequence[int | None], sizes: set[int | None]
) -> int:
    """Follow the launcher: nodes run ``LOCAL_WORLD_SIZE`` consecutive global ranks each."""
    if None in sizes or None in local_ranks:
        raise ValueError(
            "environment: LOCAL_WORLD_SIZE or LOCAL_RANK not set; start the program with torchrun, "
            "or say how many ranks of the mesh share a node (ranks_per_node)"
        )
    if len(sizes) > 1:
        least, *more = sorted(filter(None, sizes))
        raise ValueError(
            f"LOCAL_WORLD_SIZE: nodes run {' and '.join(map(str, [least, *more]))} ranks; every "
            f"node must run the same number: start {least} on each "
            f"(torchrun --nproc-per-node {least})"
        )
    size = sizes.pop()
    assert size is not None
    for rank, local_rank in zip(ranks, local_ranks, strict=True):
        if local_rank != rank % size:
            raise ValueError(
                f"LOCAL_RANK: rank {rank} has local rank {local_rank}; ranks must be numbered node "
                f"by node (expected {rank % size})"
            )
    shares = Counter(rank // size for rank in ranks)
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{count} on node {node}" for node, count in shares.items())
        raise ValueError(
            f"mesh: its ranks {_shortened(ranks)} lie unevenly on the nodes, {listed}; every node "
            "must hold the same number (lay out the mesh so, or pass ranks_per_node)"
        )
    return next(iter(shares.values()))
