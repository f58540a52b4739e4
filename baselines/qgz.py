"""ZeRO++'s qgZ over this repository's engine: ZeRO-3 whose reductions cross nodes in four bits."""

from __future__ import annotations

from dataclasses import replace

import torch.nn as nn

from baselines import fcdp
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> fcdp.FCDP:
    return fcdp.build(model, replace(job, policy="none", reduce_codec="int4"))
