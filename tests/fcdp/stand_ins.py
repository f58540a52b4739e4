"""The parts of a topology and of a unit that tiers and policies look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    nodes: int
    node: int
    ranks_per_node: int = 1
    #: What process groups would be.
    intra: str = "intra"
    inter: str = "inter"


@dataclass(eq=False)
class Entry:
    name: str
    shard_bytes: int
    reuses: int = 1


def rows(shards: torch.Tensor) -> Any:
    """One shard a node."""
    return shards.unbind()
