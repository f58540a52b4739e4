from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.__main__ import app
from experiments.records.record import Record
from tests import programs
from tests.analysis.conftest import write_records

runner = CliRunner()


def test_report_writes_beside_the_records_and_says_where(
    records: list[Record], tmp_path: Path
) -> None:
    records_file = write_records(records[:3], tmp_path / "records.jsonl")
    result = runner.invoke(app, ["report", str(records_file)])
    assert result.exit_code == 0, result.output
    directory = records_file.parent / "report"
    for name in ("report.html", "comparison.md", "cells.parquet"):
        assert (directory / name).stat().st_size > 0
        assert str(directory / name) in result.output
    assert len(list(directory.glob("*.png"))) == len(list(directory.glob("*.svg"))) == 2


def test_table_prints_markdown(records_file: Path) -> None:
    result = runner.invoke(app, ["table", str(records_file), "--markdown"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("| Model | Tuning | Link | Strategy |")
    assert "| gpt2-4x128 | full | 10 Mbit/s | FCDP |" in result.output
    assert "\n- speed-up" in result.output


@pytest.mark.parametrize("command", ["report", "table"])
def test_a_baseline_without_records_is_one_message(command: str, records_file: Path) -> None:
    result = runner.invoke(app, [command, str(records_file), "--baseline", "nosuch"])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --baseline nosuch: has no records here; allowed are ")
    assert "fsdp2" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_default_baseline_needs_no_records(records: list[Record], tmp_path: Path) -> None:
    others = [record for record in records if record.cell.strategy != "deepspeed-zero3"]
    file = write_records(others, tmp_path / "records.jsonl")
    result = runner.invoke(app, ["table", str(file)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["report", "table"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "no records found"),
        ("{}\n", ":1: not a record of this version"),
        ("not json\n", ":1: not a record of this version"),
        ("\udcff\n", ":1: not a record of this version"),
    ],
)
def test_what_cannot_be_read_is_one_message_and_status_2(
    command: str, content: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    result = runner.invoke(app, [command, str(path)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"error: {path}")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written_is_one_message(records_file: Path) -> None:
    result = runner.invoke(app, ["report", str(records_file), "--output", str(records_file)])
    assert result.exit_code == 2
    assert "cannot write the report" in result.stderr


@pytest.mark.ranks
def test_help_does_not_wait_for_pandas() -> None:
    code = "import sys, analysis.__main__; sys.exit('pandas' in sys.modules)"
    programs.printed(sys.executable, "-c", code)
