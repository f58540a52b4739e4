"""A case that runs in a second, and how to run it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from experiments.commands.memory import build
from simulation.imitated import study
from simulation.imitated.records import Case, MemoryUse
from simulation.transformer import ModelSpec

#: GPT-2 of so wide blocks that parameters weigh, and so small a vocabulary that logits do not.
LAYERS, WIDTH = 2, 512


def case(strategy: str, layers: int = LAYERS, **settings: Any) -> Case:
    model = ModelSpec(name="small", family="gpt2", layers=layers, width=WIDTH, heads=8)
    return Case(
        **{
            "strategy": strategy,
            "model": model,
            "tuning": "full",
            "checkpointing": False,
            "nodes": 4,
            "ranks_per_node": 8,
            "sequence_length": 64,
            "lora_rank": 4,
            "device_bytes": 200 * 10**6,
            "reserve_bytes": 10**6,
            **settings,
        }
    )


def found(case: Case) -> MemoryUse:
    """Called in a process that will know the imitated accelerator ever after."""
    leave_group()
    return study.find(case, build)


def leave_group() -> None:
    """End the process group that ranks of tests come with."""
    if dist.is_initialized():
        dist.destroy_process_group()
