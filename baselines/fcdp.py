"""This repository's library, with gathered parameters cached in host memory."""

from __future__ import annotations

import torch
import torch.nn as nn

import fcdp
from baselines.fsdp2 import FSDP2, mixed_precision
from baselines.policies import parse
from baselines.strategy import Job
from fcdp.engine import engine_of


def build(model: nn.Module, job: Job) -> FCDP:
    """Shard every block and the root, frozen and trainable parameters apart, and cache them."""
    fcdp.shard(
        model,
        job.topology,
        units=job.blocks,
        policy=parse(job.policy),
        mp_policy=mixed_precision(job.dtype),
    )
    return FCDP(model, job, least_bytes(model, job))


def least_bytes(model: nn.Module, job: Job) -> float:
    """Least bytes a step that this schedule must send from one node.

    A cached unit crosses nodes once a step if it is trained, and not at all if it is frozen. One
    that no tier has room for crosses for each gather of each micro-batch. Gradients cross once.
    """
    engine = engine_of(model)
    nodes = job.topology.nodes
    crossings = 0
    for unit in engine.units:
        numel = sum(param.numel() for param in unit.params)
        gathers = 1 + unit.reuses - (not unit.trainable)
        cached = bool(engine.cache.placement.preferences[unit])
        crossings += numel * (unit.trainable if cached else gathers * job.accumulation)
        crossings += numel * unit.trainable
    return (nodes - 1) / nodes * crossings * job.dtype.itemsize


class FCDP(FSDP2):
    """The same loop; only the last micro-batch reduces across nodes."""

    engine = "fcdp"

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        super().__init__(model, job, closed_form_bytes)
        self.policy = job.policy

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
