"""``python -m experiments memory``: what it writes, what it does not do again, what it refuses."""

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


def test_a_file_that_is_not_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"memory\.jsonl:1: not a record"):
        settle(["gpt-10b"], ["ddp"], [], tmp_path, 1, Console(file=StringIO()))
