"""DeepSpeed ZeRO++'s hpZ: ZeRO stage 3 with a second shard inside the node, in device memory."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from baselines import deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, crossing_bytes, trained_numel


def build(model: nn.Module, job: Job) -> DeepSpeedZero3:
    config, least = configuration(model, job)
    return deepspeed_zero3.initialize(model, job, config, least)


def configuration(model: nn.Module, job: Job) -> tuple[dict[str, Any], float]:
    """ZeRO-3's, plus secondary shards over the ranks of a node; and the least bytes of a step.

    A step drops the secondary shards of trained parameters only, in 0.16.2 as in 0.19.6: those of
    frozen parameters are gathered across nodes once ever, as FCDP's are.
    """
    # Trained parameters are gathered once a step; gradients are reduced every micro-batch.
    least = crossing_bytes(trained_numel(model), job) * (1 + job.accumulation)
    config = deepspeed_zero3.configuration(model, job)
    config["zero_optimization"]["zero_hpz_partition_size"] = job.topology.ranks_per_node
    return config, least
