"""Runs that ran fit; what the study on imitated devices refutes does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulation.compute.fit import Row, read_rows, run_of
from simulation.hardware import CARDS, cluster, reported
from simulation.imitated.study import MemoryRecord
from simulation.imitated.study import read as read_study
from simulation.prediction import largest_micro_batch, needed
from tests.simulation.test_memory import trained_in, unaware
from tests.simulation.workloads import paper_cluster

STUDY = [
    record
    for record in read_study(Path(__file__).parents[2] / "results" / "memory" / "memory.jsonl")
    if record.finding is not None
]


def label(row: Row) -> str:
    return f"{row.gpu}-{row.model}-{row.gpus}-{row.sequence_length}x{row.micro_batch}"


@pytest.mark.parametrize("row", read_rows(), ids=label)
def test_every_run_that_ran_fits(row: Row) -> None:
    run = run_of(row)
    hardware = reported(run.hardware)
    assert needed(run.workload, hardware).shortage(hardware) is None


@pytest.mark.parametrize("record", STUDY, ids=lambda record: record.case.label)
def test_no_batch_is_promised_that_the_study_refutes(record: MemoryRecord) -> None:
    hardware = reported(paper_cluster())
    most = largest_micro_batch(trained_in(record.case), hardware)
    assert record.finding is not None
    assert most <= record.finding.largest_micro_batch + unaware(record.case)


@pytest.mark.parametrize("name", CARDS)
def test_cards_have_what_they_report_less_what_cuda_takes(name: str) -> None:
    nominal = cluster(name, nodes=1, ranks_per_node=1, inter_bits_per_s=1e9)
    found = reported(nominal)
    assert 0.95 < found.device.memory_bytes / nominal.device.memory_bytes < 1.08
    assert 0.82 < found.usable_device_bytes / found.device.memory_bytes < 0.95
    if name == "h100-sxm":
        assert found.device.memory_bytes == pytest.approx(85.5e9, rel=1e-3)


def test_kernels_keep_less_the_more_they_fuse() -> None:
    run = run_of(read_rows()[0])
    for checkpointing, recomputed in (("full", 0.0), ("selective", 1.0), ("full", 1.0)):
        given = replace(run.workload, checkpointing=checkpointing, recomputed=recomputed)
        eager, flash, fused = (
            needed(replace(given, kernels=kernels), run.hardware).device_bytes
            for kernels in ("eager", "flash", "fused")
        )
        assert eager > flash > fused


def test_selective_checkpointing_keeps_less_than_none_and_more_than_full() -> None:
    run = run_of(read_rows()[0])
    none, selective, full = (
        needed(
            replace(run.workload, checkpointing=checkpointing, recomputed=recomputed), run.hardware
        ).device_bytes
        for checkpointing, recomputed in (("full", 0.0), ("selective", 1.0), ("full", 1.0))
    )
    assert none > selective > full
