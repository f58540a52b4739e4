"""The job that a strategy is given, with the values that most tests have."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn

from baselines.strategy import Job
from fcdp import Topology

#: Ten times that of the matrices: a stale parameter shows at once.
LEARNING_RATE = 1e-2


def job(topology: Topology, blocks: Iterable[nn.Module], **own: Any) -> Job:
    """A job of one micro-batch of two sequences per step in float32, but for its ``own``."""
    sizes = {"learning_rate": LEARNING_RATE, "micro_batch": 2, "accumulation": 1}
    return Job(topology, [*blocks], **({"dtype": torch.float32} | sizes | own))


def alone(nodes: int = 2, ranks_per_node: int = 2, rank: int = 0, device: str = "cpu") -> Topology:
    """One of so many ranks, without process groups, for tests that start none."""
    groups: dict[str, Any] = dict.fromkeys(("intra", "inter"))
    groups |= {f"{kind}_{name}": None for kind in ("reduce", "control") for name in groups}
    mesh: Any = SimpleNamespace(device_type=device)
    return Topology(nodes, ranks_per_node, rank, mesh=mesh, **groups)
