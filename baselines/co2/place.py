"""Who trains apart: every rank, every node or several nodes; and what trains a worker meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from baselines.presets import fcdp
from baselines.pytorch.ddp import autocast
from baselines.pytorch.fsdp2 import FSDP2, shard_each
from baselines.settings import CacheSettings, LocalSGDSettings, divided
from baselines.strategy import Job, trained_numel
from fcdp import Topology


@dataclass(frozen=True)
class Place:
    """One rank's place: what it trains of a worker, and whom it exchanges with."""

    #: The training of one worker, which knows nothing of the others.
    loop: FSDP2
    #: The ranks with the same part of each worker, one per worker.
    peers: dist.ProcessGroup
    #: The ranks that this worker is sharded over; ``None``: it is whole on this one.
    parts: dist.ProcessGroup | None
    #: Least bytes that one node sends to other workers when displacements cross once.
    exchange_bytes: float


def place(model: nn.Module, job: Job) -> Place:
    """Put the model under what trains a worker. Raises ``ValueError`` if workers do not fit."""
    settings, topology = job.settings, job.topology
    assert isinstance(settings, LocalSGDSettings)
    together = settings.nodes_per_worker
    if problem := divided(together, topology.nodes):
        raise ValueError(f"nodes_per_worker = {together}: {problem}")
    exchange = _exchange_bytes(trained_numel(model), topology.nodes, together)
    # What lies on the host is exchanged from there.
    backend = "gloo" if settings.outer_on == "host" else None
    if settings.worker == "rank":
        model.to(topology.mesh.device_type)
        everyone = _group(range(topology.world_size), backend)
        return Place(_Whole(model, job, 0.0), everyone, None, exchange)
    mesh = _by_worker(topology, together)
    parts = mesh["part"]
    loop: FSDP2
    if settings.worker == "node":
        shard_each(model, job, parts)
        loop = FSDP2(model, job, 0.0)
    else:  # what is gathered is cached on the hosts of the worker's own nodes
        own = Topology.of_mesh(parts, topology.ranks_per_node)
        loop = fcdp.build(model, replace(job, topology=own, settings=CacheSettings()))
    # Nothing else uses these groups: no gather queues behind the exchange, nor the other way.
    workers = mesh["worker"]
    peers = workers.get_group() if backend is None else _group(workers.mesh.tolist(), backend)
    return Place(loop, peers, parts.get_group(), exchange)


def _group(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    group = dist.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, group_desc="co2_workers"
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _exchange_bytes(elements: int, nodes: int, together: int) -> float:
    """Out and back as sums, in float32; a node has 1/``together`` of a worker."""
    workers = nodes / together
    return 2 * (workers - 1) / workers * elements / together * 4


def _by_worker(topology: Topology, together: int) -> DeviceMesh:
    size = together * topology.ranks_per_node
    return init_device_mesh(
        topology.mesh.device_type,
        (topology.world_size // size, size),
        mesh_dim_names=("worker", "part"),
    )


class _Whole(FSDP2):
    """A worker that is one rank: parameters stay float32, operations compute in the job's type."""

    def casting(self) -> AbstractContextManager[object]:
        return autocast(self.job)

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        with self.casting():
            return super().backward(batch, last=last)
