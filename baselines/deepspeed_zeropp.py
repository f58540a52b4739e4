"""DeepSpeed ZeRO++: hpZ, qwZ and qgZ together."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_hpz, deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, crossing_bytes, trained_numel


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """Trained parameters cross once a step in int8, gradients each micro-batch in int4."""
    config, _ = deepspeed_hpz.configuration(model, job)
    config["zero_optimization"]["zero_quantized_weights"] = True
    config["zero_optimization"]["zero_quantized_gradients"] = True
    least = crossing_bytes(trained_numel(model), job, 1 + 0.5 * job.accumulation)
    return deepspeed_zero3.initialize(model, job, config, least)
