"""This repository's library, with gathered parameters cached in host memory."""

from __future__ import annotations

import torch
import torch.nn as nn

import fcdp
from baselines.fsdp2 import FSDP2, mixed_precision
from baselines.strategy import Job, trainable_parameters


def build(model: nn.Module, job: Job) -> FCDP:
    """Shard every block and the root, frozen and trainable parameters apart, and cache them."""
    # One gather and one reduction a step of what is trained, and nothing of what is frozen.
    trained = sum(param.numel() for param in trainable_parameters(model))
    nodes = job.topology.nodes
    closed_form = 2 * (nodes - 1) / nodes * trained * job.dtype.itemsize
    fcdp.shard(
        model,
        job.topology,
        units=job.blocks,
        policy=fcdp.HostCache(),
        mp_policy=mixed_precision(job.dtype),
    )
    return FCDP(model, job, closed_form)


class FCDP(FSDP2):
    """The same loop; only the last micro-batch reduces across nodes."""

    engine = "fcdp"
    policy = "host"

    def backward(self, sequences: torch.Tensor, *, last: bool) -> torch.Tensor:
        with fcdp.accumulate(self.model, last=last):
            return super().backward(sequences, last=last)

    def take_ledger(self) -> dict[str, dict[str, float]]:
        """One node's bytes: by symmetry each of its ranks moves as much as this one."""
        ledger = fcdp.ledger(self.model)
        ranks = self.job.topology.ranks_per_node
        counts = {
            link: {phase: float(ranks * count) for phase, count in phases.items()}
            for link, phases in ledger.snapshot().items()
        }
        ledger.reset()
        return counts

    @property
    def host_cache_bytes(self) -> int:
        return fcdp.ledger(self.model).host_cache_bytes
