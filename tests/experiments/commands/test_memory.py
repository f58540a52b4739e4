"""``python -m experiments memory``: what it writes, what it does not do again, what it refuses."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.commands.memory import settle
from experiments.terminal import UNUSABLE
from simulation.imitated import study
from simulation.imitated.records import read

pytestmark = pytest.mark.ranks


def test_finished_cases_are_kept_and_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Console(file=StringIO(), width=200)
    # What is named twice is settled once.
    first = settle(["gpt-30b", "gpt-30b"], ["ddp", "ddp"], [512, 512], tmp_path, 1, shown)
    assert len(first) == len({record.case for record in first})
    assert {record.state for record in first} == {"oom"}  # 28.9 billion parameters in fp32
    kept = read(tmp_path / "memory.jsonl")
    assert len(kept) == len(first)
    assert sorted(kept, key=study.place) == sorted(first, key=study.place)
    page = (tmp_path / "memory.md").read_text(encoding="utf-8")
    assert "| ddp | oom | oom | oom | oom | – |" in page
    assert "gpt-30b" in page
    monkeypatch.setattr(study, "_settle", None)  # nothing is settled any more
    assert settle(["gpt-30b"], ["ddp"], [512], tmp_path, 1, shown) == first
    assert (tmp_path / "memory.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "30B"], "model = '30B': allowed are gpt-10b, gpt-20b, gpt-30b"),
        (["--strategy", "fcpd"], "strategy = 'fcpd': allowed are"),
        (["--length", "4096"], "length = 4096: allowed are 512, 1024, 2048"),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["memory", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == UNUSABLE
    assert message in result.output
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["memory.jsonl", "memory.md"])
def test_a_destination_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "settle", lambda *_, **__: pytest.fail("settled"))
    (tmp_path / name).mkdir()
    arguments = ["memory", "--model", "gpt-10b", "--strategy", "ddp", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == UNUSABLE
    assert f"--output = '{tmp_path / name}': cannot be written: " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_not_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "memory.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"memory\.jsonl:1: not a record"):
        settle(["gpt-10b"], ["ddp"], [], tmp_path, 1, Console(file=StringIO()))
