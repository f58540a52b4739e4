"""Whether all ranks begin with the same weights, where those are not this repository's to make."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from experiments.records.cell import Cell
from experiments.records.workload import ConfiguredModel, OwnModel
from fcdp import Topology
from fcdp.checksum import checksum


def check(model: nn.Module, cell: Cell, topology: Topology) -> None:
    """Raise ``ValueError`` on all ranks where pretrained weights or a user's own model differ.

    Each rank keeps a part of its own: parts of unequal models would make up another one.
    """
    spec = cell.model
    if isinstance(spec, OwnModel):
        key, what = "function", f"{spec.function} makes"
    elif isinstance(spec, ConfiguredModel) and spec.weights == "pretrained":
        key, what = "weights", f"{spec.config} has"
    else:
        return
    sums = [checksum(param.detach()) for param in model.parameters()]
    mine = checksum(torch.stack(sums)).item()
    every: list[int | None] = [None] * topology.world_size
    dist.all_gather_object(every, mine)
    others = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
    if others:
        raise ValueError(
            f"{cell.origin.key('model', key)}: {what} other weights on rank {others[0]} than on "
            "rank 0; give all nodes the same files, and draw random numbers from torch alone, "
            "which is seeded alike on all ranks"
        )
