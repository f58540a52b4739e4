"""A made-up study of memory."""

from __future__ import annotations

from itertools import product
from typing import Any

from analysis.load.memory import MemoryStudy
from simulation.imitated.records import Case, MemoryRecord, MemoryUse, Peak
from simulation.transformer import ModelSpec

MODELS = [
    ModelSpec(name=f"gpt-{size}b", family="gpt2", layers=48, width=64 * size, heads=size)
    for size in (10, 30)
]


def made(strategy: str, model: ModelSpec, tuning: str, again: bool, largest: int) -> MemoryRecord:
    case = Case.model_validate(
        {
            "strategy": strategy,
            "model": model,
            "tuning": tuning,
            "checkpointing": again,
            "nodes": 4,
            "ranks_per_node": 8,
            "sequence_length": 512,
            "lora_rank": 8,
            "device_bytes": 48_000_000_000,
            "reserve_bytes": 4_000_000_000,
        }
    )
    finding = MemoryUse(
        parameters=10**10,
        trainable_parameters=10**10,
        resting_device_bytes=10**9,
        peaks=[Peak(micro_batch=8, device_bytes=2 * 10**9, host_bytes=10**9)],
        largest_micro_batch=largest,
        host_cache_bytes_per_node=15 * 10**9 if strategy == "fcdp" else None,
    )
    state: Any = "ok" if largest else "oom"
    if strategy == "ddp":
        state = "skipped"
    return MemoryRecord(
        case=case,
        state=state,
        error="not run" if state == "skipped" else None,
        finding=None if state == "skipped" else finding,
        commit="0123456789",
        versions={"torch": "2.13.0"},
        started_at="2026-01-02T03:04:05+00:00",
        seconds=60.0,
    )


#: Of each strategy: gpt-10b and gpt-30b.
LARGEST = {"fcdp": (20, 7), "zero3": (20, 8), "zeropp": (16, 0), "ddp": (0, 0)}


def study() -> MemoryStudy:
    """Each strategy with each model and way of tuning, with and without checkpointing."""
    records = [
        made(name, model, tuning, again, LARGEST[name][at] * (1 + again))
        for name in LARGEST
        for at, model in enumerate(MODELS)
        for tuning, again in product(("full", "lora"), (False, True))
    ]
    return MemoryStudy("memory", "memory/memory.jsonl", records)
