"""MiCS as PyTorch ships it: FSDP2's hybrid sharding, inside the node and replicated across."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from baselines.pytorch.fsdp2 import FSDP2, shard_each
from baselines.strategy import Job, replicated_bytes
from fcdp import Topology


def build(model: nn.Module, job: Job) -> HybridShard:
    """Shard the model inside the node; gradients are all-reduced across nodes once per step."""
    return HybridShard(*shard(model, job))


def shard(model: nn.Module, job: Job) -> tuple[nn.Module, Job, float]:
    """Shard every block and the root inside the node.

    Returns the arguments of ``HybridShard``: the model, the job, the least bytes per step.
    """
    closed_form = replicated_bytes(model, job)
    shard_each(model, job, by_node(job.topology))
    return model, job, closed_form


def by_node(topology: Topology) -> DeviceMesh:
    """The ranks as a mesh of nodes (``replicate``) and of ranks inside one (``shard``)."""
    return init_device_mesh(
        topology.mesh.device_type,
        (topology.nodes, topology.ranks_per_node),
        mesh_dim_names=("replicate", "shard"),
    )


class HybridShard(FSDP2):
    """FSDP2's loop; only the last micro-batch crosses nodes (MiCS: 2-hop gradient sync)."""

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_all_reduce(last)
        return super().backward(batch, last=last)
