"""DeepSpeed hpZ whose shards wait in host memory: of existing systems the one nearest to FCDP."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_hpz, deepspeed_offload
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    config, least = deepspeed_hpz.configuration(model, job)
    return deepspeed_offload.initialize(model, job, config, least, param={"device": "cpu"})
