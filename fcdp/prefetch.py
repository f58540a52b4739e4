"""Which blocks' gathers are under way on the CPU while another computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fcdp.partition import Split

#: Blocks whose gathers are under way on the CPU while one computes. The second crosses nodes while
#: the first is spread inside the node, which the thread that issues gathers waits for.
BLOCKS_AHEAD = 2


def prefetch_forward(
    model: nn.Module, blocks: Sequence[nn.Module], splits: Sequence[Split]
) -> None:
    """Start the gathers of blocks and of their adapters while the blocks before them compute.

    Where one thread both computes and issues gathers (gloo), nothing overlaps unless it is issued
    early. On CUDA the host runs ahead by itself.
    """
    order = [model, *blocks]
    for index, module in enumerate(order):
        assert isinstance(module, FSDPModule)
        called = [
            unit
            for block in order[index + 1 :][:BLOCKS_AHEAD]
            for unit in (block, *(split.modules[0] for split in splits if split.block is block))
        ]
        module.set_modules_to_forward_prefetch(
            [unit for unit in called if isinstance(unit, FSDPModule)]
        )
