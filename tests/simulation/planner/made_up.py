"""Requests that tests plan for."""

import json
from pathlib import Path
from typing import Any

from simulation.compute import with_rates
from simulation.hardware import Hardware, cluster, reported
from simulation.planner.request import Request
from tests.simulation.workloads import paper_cluster

#: One of each kind of strategy.
KINDS = ("fsdp2", "fcdp", "hpz", "fsdp2-hsdp", "ddp", "deepspeed-zero3", "fsdp2-offload", "qwz")


def request(model: str = "gpt-30b", nodes: int = 4, gbit_s: float = 100, **more: Any) -> Request:
    """A request on the paper's cluster (papers.md 0.3)."""
    hardware = more.pop("hardware", paper_cluster(nodes, gbit_s * 1e9))
    settings: dict[str, Any] = {"strategies": KINDS, "recomputed": (0.0, 1.0), **more}
    return Request(model=model, hardware=hardware, **settings)


def rented(gpu: str, nodes: int = 4, ranks: int = 8, gbit_s: float = 10) -> Hardware:
    """A cluster with the memory that its cards report, at the rates that are fitted to runs."""
    nominal = cluster(gpu, nodes=nodes, ranks_per_node=ranks, inter_bits_per_s=gbit_s * 1e9)
    return with_rates(reported(nominal))


def config_file(directory: Path, **changes: Any) -> Path:
    """A Llama small enough to fit anywhere."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        **changes,
    }
    file = directory / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file
