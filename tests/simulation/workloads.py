"""Workloads and clusters for the simulator's tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from baselines.registry import find
from experiments.records.modelled import workload_of
from simulation.hardware import Hardware, cluster
from simulation.models import PAPER_MODELS
from simulation.prediction import Prediction, predict
from simulation.workload import Workload
from tests.experiments.cells import cell, model_spec

#: Small, so that tests are quick; every kind of unit is there.
SMALL = model_spec("gpt2", layers=6, width=512, heads=8)


def paper_cluster(nodes: int = 4, inter_bits_per_s: float = 100e9) -> Hardware:
    """The FCDP paper's cluster (papers.md 0.3).

    Nodes have 8 A40 of 48 GB and 512 GB of host memory; the paper's link is 100 Gbit/s InfiniBand.
    """
    return cluster("a40", nodes=nodes, ranks_per_node=8, inter_bits_per_s=inter_bits_per_s)


def workload(strategy: str, *, lora: bool = False, large: bool = False, **more: Any) -> Workload:
    usual = cell(
        strategy,
        model=PAPER_MODELS["gpt-10b"] if large else SMALL,
        tuning="lora" if lora else "full",
        dtype="bfloat16",
        sequence_length=512,
        micro_batch=8,
    )
    return replace(workload_of(usual), **(more | of_cycle(strategy, more)))


def of_cycle(strategy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, changed to what a cycle can have: small models have few blocks."""
    schedule = find(strategy).schedule
    if schedule is None or schedule.cycle is None:
        return {}
    at_once = settings.get("accumulation", 1) if schedule.cycle == "turns" else 2
    alone = {"accumulation": 1} if schedule.passes_on else {}
    return {"stages": min(2, at_once)} | dict(settings) | alone


def hardware(inter_bits_per_s: float = 10e9, *, nodes: int = 2, **more: Any) -> Hardware:
    return replace(paper_cluster(nodes, inter_bits_per_s), **more)


def predicted(strategy: str, *, on: Hardware | None = None, **more: Any) -> Prediction:
    return predict(workload(strategy, **more), hardware() if on is None else on)
