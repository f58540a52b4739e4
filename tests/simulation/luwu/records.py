"""LuWu's committed records beside their predictions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from experiments.records.modelled import cluster_of, measured_step
from experiments.records.record import Record, read
from simulation.calibration import Comparison, compare

RESULTS = Path(__file__).parents[3] / "results/luwu"
#: Matrices that compare bytes, and the one that compares times.
BYTES = ("one", "two", "three")


@cache
def compared(name: str) -> tuple[tuple[Record, Comparison], ...]:
    """LuWu's cells of a matrix that ran."""
    found = []
    for record in read(RESULTS / name / "records.jsonl"):
        step = measured_step(record, cluster_of(record.cell))
        if record.cell.strategy == "luwu" and step is not None:
            found.append((record, compare(step)))
    return tuple(found)
