"""ZeRO-Offload over this repository's engine: ZeRO-3 whose shards and optimizer are on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy

from baselines import fcdp
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> fcdp.FCDP:
    offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    return fcdp.build(model, replace(job, policy="none"), offload)
