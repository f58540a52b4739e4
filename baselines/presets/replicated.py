"""Data parallelism over this repository's exchanges: replicated, one all-reduce per step."""

import torch
import torch.distributed as dist
import torch.nn as nn

from baselines.part import views
from baselines.presets.fcdp import node_bytes
from baselines.pytorch.ddp import Replica
from baselines.strategy import Job, replicated_bytes, trainable_parameters
from fcdp.counts import Ledger
from fcdp.exchange import all_reduce


class Replicated(Replica):
    """FSDP2's loop with gradient accumulation without sync: only the last micro-batch reduces."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        """Replicate the model; gradients are all-reduced in ``job.dtype``, first in the node."""
        model.to(job.topology.mesh.device_type)
        for param in trainable_parameters(model):
            dist.broadcast(param.detach(), src=0)
        super().__init__(model, job, replicated_bytes(model, job))
        self._ledger = Ledger()

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        loss = super().backward(batch, last=last)
        if last:
            with self._timed("backward"):
                self._reduce()
        return loss

    def _reduce(self) -> None:
        """Average the gradients over all ranks, in one buffer, padded to a multiple of them."""
        params = [param for param in trainable_parameters(self.model) if param.grad is not None]
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return
        topology, dtype = self.job.topology, self.job.dtype
        flat = torch.cat([grad.flatten().to(dtype) for grad in grads])
        buffer = nn.functional.pad(flat, (0, -flat.numel() % topology.world_size))
        self._ledger.add_both("reduce", *all_reduce(buffer, topology))
        buffer /= topology.world_size
        means = views(buffer[: flat.numel()], grads)
        for param, mean in zip(params, means, strict=True):
            param.grad = mean.to(param.dtype)

    def take_ledger(self) -> dict[str, dict[str, float]]:
        return node_bytes(self._ledger, self.job.topology)
