"""What a strategy is given, for tests that start no process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn as nn

from baselines.strategy import Job
from fcdp import Topology


def job(
    blocks: Sequence[nn.Module],
    *,
    nodes: int = 2,
    accumulation: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Job:
    groups = cast(Any, None)
    topology = Topology(
        nodes,
        2,
        0,
        mesh=groups,
        intra=groups,
        inter=groups,
        reduce_intra=groups,
        reduce_inter=groups,
        control_intra=groups,
        control_inter=groups,
    )
    return Job(
        topology, blocks, dtype, learning_rate=1e-3, micro_batch=1, accumulation=accumulation
    )
