"""The study of memory as rows, as a run and as a figure; its records are made up."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation

from analysis import claims as papers
from analysis import memory, reproduction, runs
from analysis.quantities import Outcome, Ratio, Selection, Value
from simulation.imitated.records import Case, Finding, MemoryRecord, Peak
from simulation.transformer import ModelSpec

MODELS = [
    ModelSpec(name=f"gpt-{size}b", family="gpt2", layers=48, width=64 * size, heads=size)
    for size in (10, 30)
]


def made(strategy: str, model: ModelSpec, tuning: str, again: bool, largest: int) -> MemoryRecord:
    case = Case.model_validate(
        {
            "strategy": strategy,
            "model": model,
            "tuning": tuning,
            "checkpointing": again,
            "nodes": 4,
            "ranks_per_node": 8,
            "sequence_length": 512,
            "lora_rank": 8,
            "device_bytes": 48_000_000_000,
            "reserve_bytes": 4_000_000_000,
        }
    )
    finding = Finding(
        parameters=10**10,
        trainable_parameters=10**10,
        resting_device_bytes=10**9,
        peaks=[Peak(micro_batch=8, device_bytes=2 * 10**9, host_bytes=10**9)],
        largest_micro_batch=largest,
        host_cache_bytes_per_node=15 * 10**9 if strategy == "fcdp" else None,
    )
    state: Any = "ok" if largest else "oom"
    if strategy == "ddp":
        state = "skipped"
    return MemoryRecord(
        case=case,
        state=state,
        error="not run" if state == "skipped" else None,
        finding=None if state == "skipped" else finding,
        commit="0123456789",
        versions={"torch": "2.13.0"},
        started_at="2026-01-02T03:04:05+00:00",
        seconds=60.0,
    )


#: Of each strategy: gpt-10b and gpt-30b.
LARGEST = {"fcdp": (20, 7), "zero3": (20, 8), "zeropp": (16, 0), "ddp": (0, 0)}


@pytest.fixture
def study() -> memory.MemoryStudy:
    records = [
        made(name, model, tuning, again, LARGEST[name][at] * (1 + again))
        for name in LARGEST
        for at, model in enumerate(MODELS)
        for tuning, again in product(("full", "lora"), (False, True))
    ]
    return memory.MemoryStudy("memory", "memory/memory.jsonl", records)


def select(**settings: Any) -> Selection:
    return Selection.model_validate(settings)


def test_the_largest_batches_are_compared_at_equal_checkpointing(
    study: memory.MemoryStudy,
) -> None:
    ratio = Ratio(
        kind="ratio",
        quantity="largest_micro_batch",
        of=select(strategy="fcdp", policy="host", tuning="full"),
        over=select(strategy="zero3"),
    )

    assert [sample.value for sample in ratio.samples(study.rows)] == [1, 1, 7 / 8, 7 / 8]


def test_what_runs_out_of_memory_is_an_outcome_and_a_batch_of_none(
    study: memory.MemoryStudy,
) -> None:
    chosen = select(strategy="zeropp", model="gpt-30b", tuning="full")
    outcome = Outcome(kind="outcome", of=chosen, state="oom")
    value = Value(kind="value", quantity="largest_micro_batch", of=chosen)

    assert [sample.value for sample in outcome.samples(study.rows)] == [1.0, 1.0]
    assert [sample.value for sample in value.samples(study.rows)] == [0, 0]
    assert {sample.row.evidence for sample in outcome.samples(study.rows)} == {"simulated"}


def test_the_host_cache_is_a_share_of_the_model_in_sixteen_bits(
    study: memory.MemoryStudy,
) -> None:
    value = Value(
        kind="value", quantity="host_cache_share", of=select(strategy="fcdp", checkpointing=True)
    )

    assert {sample.value for sample in value.samples(study.rows)} == {0.75}


def test_values_drawn_are_the_records(study: memory.MemoryStudy) -> None:
    figure = memory.draw(study).figure

    assert len(figure.axes) == 2 * 4
    first, again, *_ = figure.axes[4:]
    assert first.get_title() == "gpt-30b\nfull fine-tuning"
    assert again.get_title() == "gpt-30b\nfull fine-tuning, checkpointing"
    said = [item.get_text() for item in first.texts if isinstance(item, Annotation)]
    assert said == ["skipped", "8", "0", "7"]
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "ddp",
        "zero3",
        "zeropp",
        "fcdp host",
    ]


def test_claims_are_compared_with_it(study: memory.MemoryStudy, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    path = tmp_path / "memory" / "memory.jsonl"
    path.write_text("".join(f"{item.model_dump_json()}\n" for item in study.records), "utf-8")

    of = runs.load(tmp_path)
    document = reproduction.markdown(papers.load(), of)

    assert [run.matrix for run in of] == ["memory"]
    (row,) = [line for line in document.splitlines() if line.startswith("| ZeRO++ runs out of mem")
              and "experiments memory" in line]  # fmt: skip
    assert "| 100 % | at least 100 % | simulated | reproduced |" in row
    assert "32 cases, 32 min" in row
    assert "[records](results/memory/memory.jsonl)" in document


def test_of_a_case_that_was_settled_again_the_last_record_counts(
    study: memory.MemoryStudy, tmp_path: Path
) -> None:
    first = study.records[0]
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    path = tmp_path / "memory.jsonl"
    path.write_text(f"{later.model_dump_json()}\n{first.model_dump_json()}\n", "utf-8")

    assert memory.load(path) == [later]
