"""DeepSpeed ZeRO-Offload: parameters wait on the CPU, and the optimizer steps there."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_offload, deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, zero3_bytes


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    config = deepspeed_zero3.configuration(model, job)
    least = zero3_bytes(model, job)
    cpu = {"device": "cpu"}
    return deepspeed_offload.initialize(model, job, config, least, optimizer=cpu, param=cpu)
