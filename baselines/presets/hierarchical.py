"""FSDP2's own schedule over collectives that send from each node the least that it must."""

from __future__ import annotations

import torch
import torch.nn as nn

from baselines.presets.collectives import HierarchicalGather
from baselines.presets.fcdp import node_bytes
from baselines.pytorch.fsdp2 import FSDP2
from baselines.pytorch.fsdp2 import build as sharded
from baselines.strategy import Job, trainable_parameters
from fcdp.blocks import prefetch_forward
from fcdp.counts import Ledger
from fcdp.in_flight import HostReduceScatter, InFlight
from fcdp.partial_gradients import PartialGradients
from fcdp.unit import find_units


def build(model: nn.Module, job: Job) -> HierarchicalFSDP2:
    """Shard the model over all ranks by FSDP2, and set its collectives and what runs ahead."""
    plain, topology = sharded(model, job), job.topology
    ledger, in_flight = Ledger(), InFlight(topology.failures)
    for unit in find_units(model, topology):
        unit.module.set_custom_all_gather(HierarchicalGather(topology, unit.module, ledger))
        unit.module.set_custom_reduce_scatter(
            HostReduceScatter(unit, in_flight, partials=PartialGradients(ledger), ledger=ledger)
        )
        unit.module.set_force_sum_reduction_for_comms(True)
    prefetch_forward(model, job.blocks)
    return HierarchicalFSDP2(model, job, plain.closed_form_bytes, ledger)


class HierarchicalFSDP2(FSDP2):
    """FSDP2's loop, in which no backward waits for the sums that it makes before its end."""

    def __init__(
        self, model: nn.Module, job: Job, closed_form_bytes: float, ledger: Ledger
    ) -> None:
        super().__init__(model, job, closed_form_bytes)
        self._ledger = ledger

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        # FSDP2 would wait for each sum at once, to add it to the gradients that are there.
        params = trainable_parameters(self.model)
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        loss = super().backward(batch, last=last)
        for param, earlier in zip(params, before, strict=True):
            if earlier is not None:
                param.grad = earlier if param.grad is None else param.grad.add_(earlier)
        return loss

    def take_ledger(self) -> dict[str, dict[str, float]]:
        return node_bytes(self._ledger, self.job.topology)
