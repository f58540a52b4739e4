"""The study of memory as rows and as a run; its records are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.claims import papers
from analysis.load import runs
from analysis.report import reproduction
from tests.analysis import memory_study


@pytest.fixture
def study() -> runs.MemoryStudy:
    return memory_study.study()


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
