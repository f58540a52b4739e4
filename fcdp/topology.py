"""Nodes × ranks a node, and the process groups along both directions."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, eq=False)
class Topology:
    """Where every rank stands, built once and shared by all units.

    Ranks are numbered node by node, as torchrun does: ``rank = node · L + local_rank`` with
    ``L = ranks_per_node``. Make one with :meth:`from_env` or :meth:`build`.
    """

    nodes: int
    ranks_per_node: int
    rank: int
    #: 1-D mesh over all ranks: what ``fully_shard`` shards over.
    mesh: DeviceMesh
    #: The ranks of this node.
    intra: dist.ProcessGroup
    #: The ranks with this ``local_rank``, one a node.
    inter: dist.ProcessGroup
    reduce_intra: dist.ProcessGroup
    reduce_inter: dist.ProcessGroup
    control_intra: dist.ProcessGroup
    control_inter: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_node

    @classmethod
    def from_env(cls, device_type: str | None = None) -> Topology:
        """Read the topology from what torchrun sets, and check it on all ranks.

        Initialises the default process group if nobody has. Raises ``ValueError`` on every rank
        if the nodes run unequal numbers of ranks or ranks are not numbered node by node.
        """
        missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"environment: {', '.join(missing)} not set; start the program with torchrun, "
                "or describe the cluster with Topology.build(nodes, ranks_per_node)"
            )
        device_type = device_type or _default_device_type()
        _init_process_group(device_type)
        local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        _check_equal_nodes(local_world_size, int(os.environ["LOCAL_RANK"]))
        return cls.build(dist.get_world_size() // local_world_size, local_world_size, device_type)

    @classmethod
    def build(cls, nodes: int, ranks_per_node: int, device_type: str | None = None) -> Topology:
        """Lay ``nodes × ranks_per_node`` over the default process group.

        Collective: every rank calls it once, with the same arguments. Nodes may be emulated, as
        several on one host. Raises ``ValueError`` if the product is not the world size.
        """
        device_type = device_type or _default_device_type()
        _init_process_group(device_type)
        world_size = dist.get_world_size()
        if nodes < 1 or ranks_per_node < 1 or nodes * ranks_per_node != world_size:
            raise ValueError(
                f"nodes × ranks_per_node = {nodes} × {ranks_per_node}: "
                f"must be positive and multiply to the world size, {world_size}"
            )
        grid = init_device_mesh(
            device_type, (nodes, ranks_per_node), mesh_dim_names=("inter", "intra")
        )
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
        return cls(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            rank=dist.get_rank(),
            mesh=mesh,
            intra=grid.get_group("intra"),
            inter=grid.get_group("inter"),
            reduce_intra=grid.get_group("intra"),
            reduce_inter=grid.get_group("inter"),
            control_intra=grid.get_group("intra"),
            control_inter=grid.get_group("inter"),
        )


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _init_process_group(device_type: str) -> None:
    if dist.is_initialized():
        return
    if device_type != "cpu":
        # Before the first collective: NCCL binds a rank to the device that is current then.
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group({"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(device_type))


def _check_equal_nodes(local_world_size: int, local_rank: int) -> None:
    """Raise the same error on every rank, so that none waits for one that has left."""
    places: list[tuple[int, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (local_world_size, local_rank))
    sizes = sorted({place[0] for place in places if place is not None})
    if len(sizes) > 1:
        raise ValueError(
            f"LOCAL_WORLD_SIZE: nodes run {' and '.join(map(str, sizes))} ranks; "
            "every node must run the same number (torchrun --nproc-per-node)"
        )
    for rank, place in enumerate(places):
        if place is not None and place[1] != rank % local_world_size:
            raise ValueError(
                f"LOCAL_RANK: rank {rank} has local rank {place[1]}; ranks must be numbered node "
                f"by node (expected {rank % local_world_size})"
            )
