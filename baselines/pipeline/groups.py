"""Groups of nodes that a pipeline goes through, one after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from baselines.settings import PipelineSettings, divided
from baselines.strategy import Job
from fcdp import Topology


@dataclass(frozen=True)
class Groups:
    """Groups of equally many nodes, each of which has one stage of each round, as a rank sees them.

    Ranks of one place in their groups are a pipeline.
    """

    count: int
    #: This rank's group, and its place there.
    index: int
    place: int
    #: Ranks of a group, and those of them that share one copy of its stages.
    ranks: int
    sharers: int
    #: The ranks of this place, one of each group.
    pipeline: dist.ProcessGroup
    #: The ranks of this group, which shard a stage or replicate it.
    mesh: DeviceMesh
    #: The same ranks and their nodes, if FCDP shards a stage over them.
    inside: Topology | None

    @classmethod
    def of(cls, job: Job) -> Groups:
        """The groups of a job. Raises ``ValueError`` if they do not divide the nodes."""
        topology, settings = job.topology, settings_of(job)
        nodes, within = settings.nodes_per_stage, settings.within_stage
        if problem := divided(nodes, topology.nodes):
            raise ValueError(f"nodes_per_stage = {nodes}: {problem}")
        count, ranks = topology.nodes // nodes, nodes * topology.ranks_per_node
        sharers = 1 if within == "replicated" else ranks
        sizes, names = (count, ranks // sharers, sharers), ("stage", "replicate", "shard")
        mesh = init_device_mesh(topology.mesh.device_type, sizes, mesh_dim_names=names)
        own = mesh["replicate", "shard"] if sharers == 1 else mesh["shard"]
        return cls(
            count=count,
            index=topology.rank // ranks,
            place=topology.rank % ranks,
            ranks=ranks,
            sharers=sharers,
            pipeline=mesh["stage"].get_group(),
            mesh=own,
            inside=Topology.of_mesh(mesh["shard"], topology.ranks_per_node)
            if within == "fcdp"
            else None,
        )


def settings_of(job: Job) -> PipelineSettings:
    """The job's settings, as ``baselines.strategy.load`` has checked them."""
    assert isinstance(job.settings, PipelineSettings), f"{job.settings!r}: must be a pipeline's"
    return job.settings
