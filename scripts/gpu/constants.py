"""Preflight's constants of this machine, in preflight's file format, for the planner.

``experiments preflight`` needs pydantic and agents on nodes; its probe needs neither.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import torch

from experiments.preflight import probe
from scripts.gpu import ranks, records
from scripts.gpu.ranks import Rank
from scripts.gpu.records import NOT_ON_CPU, Brief, Record

FILE = "preflight.json"


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    """Measure on all GPUs of this machine, or on two ranks of its CPUs."""
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    world_size = 2 if brief.device == "cpu" else torch.cuda.device_count()
    outcome = ranks.run(
        on_this_rank, {}, world_size=world_size, device=brief.device, limit_s=limit_s
    )
    if outcome.state != "ended":
        record.failed("measurements", str(outcome))
        return
    probed = outcome.lines[0][0]
    content = {
        **probed,
        "backend": "gloo" if brief.device == "cpu" else "nccl",
        "version": 1,
        "evidence": "measured",
        "nodes": 1,
        "ranks_per_node": world_size,
        "inter_bandwidth_bits_per_s": None,
        "network": {},
        **records.origin(brief.device, None),
        "started_at": started_at,
        "seconds": outcome.seconds,
    }
    records.write(brief.out / FILE, content)
    judge(record, probed, brief.device == "cpu")


def judge(record: Record, probed: dict[str, Any], on_cpu: bool) -> None:
    compute = probed["compute"]
    rates = compute["matmul_flops_per_s"]
    for name, rate in rates.items():
        record.figures[f"{name} TFLOP/s"] = rate / 1e12
    for name, rate in {**probed["host"], "memory": compute["memory_bytes_per_s"]}.items():
        if rate is not None and name != "free_bytes":
            record.figures[f"{name.removesuffix('_bytes_per_s')} GB/s"] = rate / 1e9
    record.passed_if(all(rate > 0 for rate in rates.values()), "matrix products")
    if on_cpu:
        record.not_measured("copies to and from a device, and its memory", NOT_ON_CPU)
    if probed["links"]["intra_node_all_gather"] is None:
        record.not_measured("collectives inside the node", "there is one GPU")
    else:
        record.passed_if(True, "collectives inside the node")


def on_this_rank(rank: Rank) -> None:
    rank.answer(probe.measure(rank.join(1, rank.world_size)))
