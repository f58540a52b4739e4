"""The study of memory as rows and as a run; its records are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.claims import papers
from analysis.claims.computations import Outcome, Ratio, Selection, Value
from analysis.load import runs
from analysis.report import reproduction
from tests.analysis import memory_study


@pytest.fixture
def study() -> runs.MemoryStudy:
    return memory_study.study()


def select(**settings: Any) -> Selection:
    return Selection.model_validate(settings)


def test_the_largest_batches_are_compared_at_equal_checkpointing(
    study: runs.MemoryStudy,
) -> None:
    ratio = Ratio(
        kind="ratio",
        quantity="largest_micro_batch",
        of=select(strategy="fcdp", policy="host", tuning="full"),
        over=select(strategy="zero3"),
    )
    assert [sample.value for sample in ratio.samples(study.rows)] == [1, 1, 7 / 8, 7 / 8]


def test_what_runs_out_of_memory_is_an_outcome_and_a_batch_of_none(
    study: runs.MemoryStudy,
) -> None:
    chosen = select(strategy="zeropp", model="gpt-30b", tuning="full")
    outcome = Outcome(kind="outcome", of=chosen, state="oom")
    value = Value(kind="value", quantity="largest_micro_batch", of=chosen)
    assert [sample.value for sample in outcome.samples(study.rows)] == [1.0, 1.0]
    assert [sample.value for sample in value.samples(study.rows)] == [0, 0]
    assert {sample.row.evidence for sample in outcome.samples(study.rows)} == {"simulated"}


def test_the_host_cache_is_a_share_of_the_model_in_sixteen_bits(
    study: runs.MemoryStudy,
) -> None:
    value = Value(
        kind="value", quantity="host_cache_share", of=select(strategy="fcdp", checkpointing=True)
    )
    assert {sample.value for sample in value.samples(study.rows)} == {0.75}


def test_claims_are_compared_with_it(study: runs.MemoryStudy, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    path = tmp_path / "memory" / "memory.jsonl"
    path.write_text("".join(f"{item.model_dump_json()}\n" for item in study.records), "utf-8")
    of = runs.load(tmp_path)
    pages = reproduction.document(papers.load(), of).markdown
    document = pages["results/paper/claims.md"]
    assert [run.matrix for run in of] == ["memory"]
    (row,) = [line for line in document.splitlines() if line.startswith("| ZeRO++ runs out of mem")
              and "experiments memory" in line]  # fmt: skip
    assert "| 100 % | at least 100 % | simulated | agrees |" in row
    assert "32 cases, 32 min" in row
    assert "[records](../memory/memory.jsonl)" in pages["results/paper/runs.md"]


def test_of_a_case_that_was_settled_again_the_last_record_counts(
    study: runs.MemoryStudy, tmp_path: Path
) -> None:
    first = study.records[0]
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    path = tmp_path / "memory.jsonl"
    path.write_text(f"{later.model_dump_json()}\n{first.model_dump_json()}\n", "utf-8")
    assert runs.of_memory(path) == [later]
