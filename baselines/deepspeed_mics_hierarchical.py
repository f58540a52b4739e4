"""DeepSpeed MiCS that gathers in two hops, where a shard spans more than a node's fast links."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_mics
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    return deepspeed_mics.build(model, job, hierarchical=True)
