"""Workloads and clusters for the simulator's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.records.modelled import workload_of
from simulation.hardware import Hardware, paper_cluster
from simulation.paper_models import PAPER_MODELS
from simulation.prediction import Prediction, predict
from simulation.workload import Workload
from tests.experiments.cells import cell, model_spec

#: Small, so that tests are quick; every kind of unit is there.
SMALL = model_spec("gpt2", layers=6, width=512, heads=8)


def workload(strategy: str, *, lora: bool = False, large: bool = False, **more: Any) -> Workload:
    given = cell(
        strategy,
        model=PAPER_MODELS["gpt-10b"] if large else SMALL,
        tuning="lora" if lora else "full",
        dtype="bfloat16",
        sequence_length=512,
        micro_batch=8,
    )
    return replace(workload_of(given), **more)


def hardware(inter_bits_per_s: float = 10e9, *, nodes: int = 2, **more: Any) -> Hardware:
    return replace(paper_cluster(nodes, inter_bits_per_s), **more)


def predicted(strategy: str, *, on: Hardware | None = None, **more: Any) -> Prediction:
    return predict(workload(strategy, **more), hardware() if on is None else on)
