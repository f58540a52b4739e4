"""What slots send and keep: as the committed records counted it, and evenly."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.clusters.simulated import measured
from experiments.records.modelled import cluster_of, workload_of
from experiments.records.record import Record, read
from simulation.cycle import kept, sent, stages_of
from simulation.prediction import predict
from tests.simulation.workloads import workload

RECORDS = Path(__file__).parents[3] / "results" / "cyclic-slots" / "records.jsonl"


def counted() -> list[Record]:
    return [
        record
        for record in read(RECORDS)
        if record.measurement
        and (record.measurement.bytes_by_slot or record.measurement.activation_bytes_by_slot)
    ]


@pytest.mark.parametrize("record", counted(), ids=lambda record: record.cell_id)
def test_slots_are_those_of_the_records(record: Record) -> None:
    """Bytes exactly; activations, which are counted by hand, within 4 %."""
    workload, hardware = workload_of(record.cell), cluster_of(record.cell)
    found = measured(workload, hardware, predict(workload, hardware))
    assert record.measurement is not None
    assert found.bytes_by_slot == record.measurement.bytes_by_slot
    if record.measurement.activation_bytes_by_slot is None:
        assert found.activation_bytes_by_slot is None
        return
    assert found.activation_bytes_by_slot == pytest.approx(
        record.measurement.activation_bytes_by_slot, rel=0.04
    )
    assert found.activation_bytes_together == pytest.approx(
        record.measurement.activation_bytes_together, rel=0.04
    )


@given(st.integers(2, 9), st.integers(1, 6), st.sampled_from(["v1", "v2"]))
def test_a_slot_of_a_ring_sends_one_stage_at_most(
    ranks: int, stages: int, rule: Literal["v1", "v2"]
) -> None:
    of = workload("cyclic-ring", stages=min(stages, ranks), rule=rule)
    trained = stages_of(of, ranks).trained
    found = sent(of, ranks)
    assert found is not None
    assert len(found) == 2 * len(trained)
    for nbytes, stage in zip(found, [*trained, *reversed(trained)], strict=True):
        assert nbytes in (0, 4 * stage)


def test_others_have_no_slots() -> None:
    for strategy in ("ddp", "cyclic", "cyclic-interleaved"):
        assert sent(workload(strategy), 2) is None
    for strategy in ("ddp", "cyclic", "cyclic-ring"):
        assert kept(workload(strategy), 2, 1.0) is None
