"""DeepSpeed MiCS: sharded over the ranks of a node, replicated across nodes."""

from __future__ import annotations

import torch.nn as nn

from baselines import deepspeed_zero3
from baselines.deepspeed_zero3 import DeepSpeedZero3
from baselines.strategy import Job, replicated_bytes


def build(model: nn.Module, job: Job, *, hierarchical: bool = False) -> DeepSpeedZero3:
    """Gathers stay inside the node; gradients are all-reduced across nodes once a step."""
    config = deepspeed_zero3.configuration(model, job)
    config["zero_optimization"]["mics_shard_size"] = job.topology.ranks_per_node
    config["zero_optimization"]["mics_hierarchical_params_gather"] = hierarchical
    least = replicated_bytes(model, job)
    return deepspeed_zero3.initialize(model, job, config, least)
