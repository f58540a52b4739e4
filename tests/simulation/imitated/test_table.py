"""Tables and the paper's statements say what the records say."""

from __future__ import annotations

from pathlib import Path

from simulation import files, models
from simulation.imitated import study
from simulation.imitated.records import MemoryRecord, MemoryUse, Peak, read


def record(
    strategy: str,
    largest: int | None,
    *,
    tuning: str = "full",
    length: int = 512,
    error: str | None = None,
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
        error=error,
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


def test_statements_are_compared_case_by_case() -> None:
    records = [
        record("fcdp", 5),
        record("zero3", 5),
        record("fsdp2", 6),
        record("zeropp", 0),
        record("fcdp", 9, tuning="lora"),
        record("zero3", 8, tuning="lora"),
        record("zeropp", 3, length=2048),
    ]
    said = dict(study.statements(records).rows)
    assert said["ZeRO++ runs out of memory at 30B"] == (
        "largest micro-batch 0 without checkpointing"
    )
    assert said["FCDP trains at ZeRO-3's largest batch (host cache)"] == "in 1 of 2 cases"
    assert said["the same, against PyTorch's FSDP2"] == "in 0 of 1 cases"
    assert said["ZeRO++ must use smaller batches than ZeRO-3"] == "in 1 of 1 cases"
    assert said["MiCS runs out of memory on large models"] == "not run"


def test_the_page_states_the_set_up_and_what_was_not_run() -> None:
    page = study.markdown([record("fcdp", 5), record("ddp", None, error="not run: a reason")])
    for part in (
        "4 × 8 ranks with 48 GB",
        "4 GB are left",
        "512 tokens per sequence",
        "Evidence: simulated",
    ):
        assert part in page
    assert "- `ddp`: not run: a reason" in page


def test_records_are_read_back(tmp_path: Path) -> None:
    written = [record("fcdp", 5), record("ddp", None)]
    for each in written:
        files.append(each, tmp_path / "memory.jsonl")
    assert read(tmp_path / "memory.jsonl") == written
