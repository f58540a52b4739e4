"""ZeRO++ over this repository's engine: hpZ, qwZ and qgZ together."""

from __future__ import annotations

from dataclasses import replace

import torch.nn as nn

from baselines import fcdp
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> fcdp.FCDP:
    return fcdp.build(
        model, replace(job, policy="device", gather_codec="int8", reduce_codec="int4")
    )
