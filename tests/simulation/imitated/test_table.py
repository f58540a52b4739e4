"""Tables say what the records say."""

from __future__ import annotations

from pathlib import Path

from simulation import files, models
from simulation.imitated import study
from simulation.imitated.records import MemoryRecord, MemoryUse, Peak, read


def record(
    strategy: str, largest: int | None, *, tuning: str = "full", length: int = 512
) -> MemoryRecord:
    """Of the 30B model without checkpointing; the peak at 8 is 10 GB a sequence that fits."""
    (case,) = (
        each
        for each in study.cases([models.find("gpt-30b")], [strategy], [length])
        if each.policy == "host" and each.tuning == tuning and not each.checkpointing
    )
    finding = None
    if largest is not None:
        finding = MemoryUse(
            parameters=10,
            trainable_parameters=10,
            resting_device_bytes=1,
            peaks=[Peak(micro_batch=8, device_bytes=50 * 10**9, host_bytes=2 * 10**9)],
            largest_micro_batch=largest,
            host_cache_bytes_per_node=None,
        )
    return MemoryRecord(
        case=case,
        state="skipped" if finding is None else "ok",
        error=None,
        finding=finding,
        commit=None,
        versions={},
        started_at="2026-01-01T00:00:00+00:00",
        seconds=1.0,
    )


def test_a_row_holds_the_largest_micro_batch_the_papers_peak_and_the_host() -> None:
    (one,) = study.tables(
        [record("fcdp", 5), record("fcdp", 7, tuning="lora"), record("ddp", None)]
    )
    assert one.title == "gpt-30b, 512 tokens per sequence"
    assert one.rows == [
        ("fcdp host", "5 (50.0 GB)", "", "7 (50.0 GB)", "", "16.0"),
        ("ddp", "skipped", "", "", "", "–"),
    ]


def test_each_length_has_a_table() -> None:
    found = study.tables([record("fcdp", 1, length=2048), record("fcdp", 5)])
    assert [one.title.partition(", ")[2] for one in found] == [
        "512 tokens per sequence",
        "2,048 tokens per sequence",
    ]


def test_records_are_read_back(tmp_path: Path) -> None:
    written = [record("fcdp", 5), record("ddp", None)]
    for each in written:
        files.append(each, tmp_path / "memory.jsonl")
    assert read(tmp_path / "memory.jsonl") == written
