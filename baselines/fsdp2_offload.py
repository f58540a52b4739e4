"""ZeRO-Offload as PyTorch ships it: FSDP2 whose shards and optimizer stay in host memory."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from baselines.fsdp2 import FSDP2, mixed_precision
from baselines.strategy import Job, zero3_bytes


def build(model: nn.Module, job: Job) -> FSDP2:
    """ZeRO-3's schedule; the optimizer steps where the shards are. On a CPU it is FSDP2 itself."""
    closed_form = zero3_bytes(model, job)
    offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    for module in [*job.blocks, model]:
        fully_shard(
            module,
            mesh=job.topology.mesh,
            mp_policy=mixed_precision(job.dtype),
            offload_policy=offload,
        )
    return FSDP2(model, job, closed_form)
