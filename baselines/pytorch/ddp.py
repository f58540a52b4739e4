"""Data parallelism without sharding: PyTorch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from baselines.pytorch.fsdp2 import FSDP2
from baselines.strategy import Job, replicated_bytes, trained_numel


def build(model: nn.Module, job: Job) -> DDP:
    """Replicate the model; gradients are all-reduced once per step, in ``job.dtype``."""
    closed_form = replicated_bytes(model, job)
    device = job.topology.mesh.device_type
    if not trained_numel(model):  # DDP has nothing to reduce then, and refuses
        return DDP(model.to(device), job, closed_form)
    replica = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    if job.dtype == torch.bfloat16:
        # Under its own name PyTorch refuses the hook without NCCL; gloo reduces bfloat16 too.
        replica.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    return DDP(replica, job, closed_form)


class Replica(FSDP2):
    """FSDP2's loop over a whole model: weights stay float32, operations are in the job's type."""

    def casting(self) -> torch.autocast:
        return autocast(self.job)


class DDP(Replica):
    """Gradient accumulation without sync."""

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with nullcontext() if last else self.model.no_sync():
            return super().backward(batch, last=last)


def autocast(job: Job, *, cached: bool = True) -> torch.autocast:
    """Compute in ``job.dtype`` by autocast; parameters keep their dtype.

    ``cached``: a parameter that is used several times is cast once.
    """
    device = job.topology.mesh.device_type
    enabled = job.dtype != torch.float32
    return torch.autocast(device, job.dtype, enabled=enabled, cache_enabled=cached)
