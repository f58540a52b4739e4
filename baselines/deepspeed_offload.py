"""DeepSpeed ZeRO-Offload: ZeRO stage 3 whose optimizer states and steps are on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from baselines import deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, trainable_parameters, zero3_bytes


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    """The bytes between nodes are ZeRO-3's: what is offloaded is a rank's own part."""
    config = deepspeed_zero3.configuration(model, job)
    return initialize(model, job, config, zero3_bytes(model, job), optimizer={"device": "cpu"})


def initialize(
    model: nn.Module,
    job: Job,
    config: dict[str, Any],
    closed_form_bytes: float,
    *,
    optimizer: dict[str, Any] | None = None,
    param: dict[str, Any] | None = None,
) -> DeepSpeedZero3:
    """DeepSpeed's engine with parts of it offloaded to where ``optimizer`` and ``param`` say."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Page-locked memory is what makes copies overlap with compute; a CPU run has no copies.
    pinned = {"pin_memory": torch.accelerator.is_available()}
    if param is not None:
        config["zero_optimization"]["offload_param"] = {**param, **pinned}
    steps = None
    if optimizer is not None:
        config["zero_optimization"]["offload_optimizer"] = {**optimizer, **pinned}
        deepspeed_zero3.build_operators("CPUAdamBuilder")
        steps = DeepSpeedCPUAdam(trainable_parameters(model), lr=job.learning_rate)
    return deepspeed_zero3.initialize(model, job, config, closed_form_bytes, steps)
