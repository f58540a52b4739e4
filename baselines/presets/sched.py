"""The paper's FCDP-Sched alone: the cache without telling frozen from trained parameters.

Every parameter counts as written by the optimizer step, so that frozen ones cross nodes each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

import fcdp as library
from baselines.presets import fcdp
from baselines.strategy import Job, crossing_bytes, numel
from fcdp.engine import engine_of


def build(model: nn.Module, job: Job) -> Sched:
    """Shard the model as FCDP does; what is cached lasts for one step."""
    return Sched(fcdp.build(model, job).model, job, _least_bytes(model, job))


def _least_bytes(model: nn.Module, job: Job) -> float:
    """Least bytes per step of FCDP, and frozen units once more where a tier keeps them."""
    engine = engine_of(model)
    frozen = [
        unit
        for unit in engine.units
        if not unit.trainable and engine.cache.placement.preferences[unit]
    ]
    again = sum(crossing_bytes(numel(unit.params), job) for unit in frozen)
    return fcdp.least_bytes(model, job) + again


class Sched(fcdp.FCDP):
    """FCDP's loop; no entry outlives a step."""

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        total = super().step(micro_batches)
        library.invalidate(self.model)
        return total
