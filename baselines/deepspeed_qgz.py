"""DeepSpeed ZeRO++'s qgZ alone: ZeRO stage 3 that reduces gradients in int4 blocks."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, zero3_bytes


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    config = deepspeed_zero3.configuration(model, job)
    config["zero_optimization"]["zero_quantized_gradients"] = True
    least = zero3_bytes(model, job, reduced=0.5)
    return deepspeed_zero3.initialize(model, job, config, least)
