"""hpZ as PyTorch ships it: FSDP2 that reshards over the node after forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.nn as nn
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

from baselines.pytorch.fsdp2 import FSDP2, shard_each
from baselines.strategy import Job, crossing_bytes, numel, trained_numel


def build(model: nn.Module, job: Job) -> FSDP2:
    """Shard the model; per micro-batch forward gathers across nodes and backward inside."""
    topology = job.topology
    moved = numel(model.parameters()) + trained_numel(model)
    closed_form = crossing_bytes(moved, job) * job.accumulation
    with _one_mesh_for_all():
        shard_each(model, job, topology.mesh, reshard_after_forward=topology.ranks_per_node)
    return FSDP2(model, job, closed_form)


@contextmanager
def _one_mesh_for_all() -> Iterator[None]:
    """Have all modules share the mesh that they reshard to.

    FSDP2 makes one per module, each with process groups of its own: a model of many layers runs
    out of them.
    """
    make = _fsdp_init._get_post_forward_mesh_info
    made: list[Any] = []

    def once(*args: Any) -> Any:
        if not made:
            made.append(make(*args))
        return made[0]

    with ExitStack() as patches:
        for module in (_fsdp_init, _fully_shard):
            if hasattr(module, make.__name__):
                patches.enter_context(mock.patch.object(module, make.__name__, once))
        yield
