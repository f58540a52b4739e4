"""Data parallelism over this repository's exchanges: replicated, one all-reduce per step."""

from __future__ import annotations

import torch
import torch.nn as nn

from baselines.presets.fcdp import node_bytes
from baselines.pytorch.ddp import autocast
from baselines.pytorch.fsdp2 import FSDP2
from baselines.strategy import Job, replicated_bytes, trainable_parameters
from fcdp.counts import Ledger
from fcdp.replicas import Replicas


def build(model: nn.Module, job: Job) -> Replicated:
    """Replicate the model; gradients are all-reduced in ``job.dtype``, first inside the node."""
    device = torch.device(job.topology.mesh.device_type)
    model.to(device)
    return Replicated(model, job, replicated_bytes(model, job))


class Replicated(FSDP2):
    """FSDP2's loop with gradient accumulation without sync: only the last micro-batch reduces."""

    engine = "fcdp"

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        super().__init__(model, job, closed_form_bytes)
        self._ledger = Ledger()
        device = torch.device(job.topology.mesh.device_type)
        self._replicas = Replicas(
            trainable_parameters(model), model, job.topology, device, self._ledger, job.dtype
        )
        self._replicas.make_equal()

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        self._replicas.requires_sync = last
        with self.casting():
            return super().backward(batch, last=last)

    def casting(self) -> torch.autocast:
        return autocast(self.job)

    def take_ledger(self) -> dict[str, dict[str, float]]:
        return node_bytes(self._ledger, self.job.topology)
