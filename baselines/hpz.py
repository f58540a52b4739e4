"""ZeRO++'s hpZ over this repository's engine: gathered parameters stay on the devices of a node."""

from __future__ import annotations

from dataclasses import replace

import torch.nn as nn

from baselines import fcdp
from baselines.strategy import Job


def build(model: nn.Module, job: Job) -> fcdp.FCDP:
    return fcdp.build(model, replace(job, policy="device"))
