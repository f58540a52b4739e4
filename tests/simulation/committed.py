"""Committed records, each beside what the simulator says of its cell."""

from functools import cache

from experiments.records.allowed import why_not_simulated
from experiments.records.modelled import cluster_of, measured_step
from experiments.records.record import Record, read
from simulation.emulated import Comparison, MeasuredStep
from simulation.prediction import predict
from tests.programs import ROOT


@cache
def records(name: str) -> tuple[Record, ...]:
    return tuple(read(ROOT / "results" / name / "records.jsonl"))


def step_of(record: Record) -> MeasuredStep | None:
    return measured_step(record, cluster_of(record.cell))


@cache
def compared(name: str) -> tuple[tuple[Record, Comparison], ...]:
    """The cells of a matrix that ran and that are simulated."""
    simulated = (record for record in records(name) if not why_not_simulated(record.cell))
    pairs = ((record, step_of(record)) for record in simulated)
    return tuple(
        (record, Comparison.of(step, predict(step.workload, step.hardware)))
        for record, step in pairs
        if step is not None
    )
