"""A case that runs in a second, and how to run it."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from experiments.commands.memory import build
from experiments.records.cell import Cell
from experiments.records.modelled import workload_of
from simulation.imitated import study
from simulation.imitated.records import Case, MemoryRecord, MemoryUse, Peak
from simulation.prediction import needed
from simulation.transformer import ModelSpec
from simulation.workload import Workload
from tests.simulation.workloads import paper_cluster

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


def trained_in(case: Case, micro_batch: int = 1) -> Workload:
    """The case in the simulator's terms."""
    of_cell = replace(workload_of(Cell.of_case(case)), recomputed=float(case.checkpointing))
    return replace(of_cell, micro_batch=micro_batch)


def planned(case: Case, micro_batch: int) -> float:
    """Bytes of a rank's device by the simulator, without the reserve."""
    hardware = replace(paper_cluster(case.nodes), device_reserve_bytes=0.0)
    return needed(trained_in(case, micro_batch), hardware).device_bytes


def settled(case: Case, largest: int | None, **figures: Any) -> MemoryRecord:
    """A made-up record of a case, which was not run if there is no micro-batch."""
    use = {
        "parameters": 10**10,
        "trainable_parameters": 10**10,
        "resting_device_bytes": 10**9,
        "peaks": [Peak(micro_batch=8, device_bytes=50 * 10**9, host_bytes=2 * 10**9)],
        "largest_micro_batch": largest,
        "host_cache_bytes_per_node": None,
    }
    return MemoryRecord(
        case=case,
        state="skipped" if largest is None else "ok" if largest else "oom",
        error="not run" if largest is None else None,
        finding=None if largest is None else MemoryUse(**(use | figures)),
        commit="0123456789",
        versions={"torch": "2.13.0"},
        started_at="2026-01-02T03:04:05+00:00",
        seconds=60.0,
    )


def measure(case: Case) -> MemoryUse:
    """Memory of a case, in a process that knows the imitated accelerator ever after."""
    leave_group()
    return study.find(case, build)


def leave_group() -> None:
    """End the process group that ranks of tests come with."""
    if dist.is_initialized():
        dist.destroy_process_group()
