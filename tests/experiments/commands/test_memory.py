"""``python -m experiments memory``: what it writes, and what it does not do again."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from experiments.commands.memory import settle
from simulation.imitated import study
from simulation.imitated.records import read

pytestmark = pytest.mark.system


def test_finished_cases_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Console(file=StringIO(), width=200)
    # What is named twice is settled once.
    first = settle(["gpt-30b", "gpt-30b"], ["ddp", "ddp"], [512, 512], tmp_path, 1, shown)
    assert len(first) == len({record.case for record in first})
    assert {record.state for record in first} == {"oom"}  # 28.9 billion parameters in fp32
    stored = read(tmp_path / "memory.jsonl")
    assert len(stored) == len(first)
    assert {record.case: record for record in stored} == {record.case: record for record in first}
    page = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "gpt-30b, 512 tokens per sequence" in page
    assert page.split().count("oom") == 2 * len(first)
    monkeypatch.setattr(study, "_settle", None)  # nothing is settled any more
    assert settle(["gpt-30b"], ["ddp"], [512], tmp_path, 1, shown) == first
