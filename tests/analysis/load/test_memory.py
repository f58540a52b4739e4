"""The study of memory as rows and as a run; its records are made up."""

from pathlib import Path

from analysis.claims import papers
from analysis.load import runs
from analysis.report import reproduction
from simulation import files
from tests.analysis import memory_study


def test_claims_are_compared_with_it(tmp_path: Path) -> None:
    files.write(memory_study.study().records, tmp_path / "memory" / "memory.jsonl")
    of = runs.load(tmp_path)
    pages = reproduction.document(papers.load(), of).markdown
    document = pages["results/paper/claims.md"]
    assert [run.matrix for run in of] == ["memory"]
    (row,) = [line for line in document.splitlines() if line.startswith("| ZeRO++ runs out of mem")
              and "experiments memory" in line]  # fmt: skip
    assert "| 100 % | at least 100 % | simulated | agrees |" in row
    assert "32 cases, 32 min" in row
    assert "[records](../memory/memory.jsonl)" in pages["results/paper/runs.md"]


def test_of_a_case_that_was_settled_again_the_last_record_counts() -> None:
    first = memory_study.study().records[0]
    later = first.model_copy(update={"started_at": "2026-01-03T00:00:00+00:00"})
    assert runs.of_memory("memory.jsonl", [later, first]).records == [later]
