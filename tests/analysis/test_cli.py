import sys
from pathlib import Path

import pytest

from experiments.records.record import Record
from tests import programs
from tests.analysis.conftest import called, write_records
from tests.experiments.golden import cases


def test_report_writes_beside_records_and_says_where(records: list[Record], tmp_path: Path) -> None:
    records_file = write_records(records[:3], tmp_path / "records.jsonl")
    result = called("report", records_file)
    directory = records_file.parent / "report"
    for name in ("report.html", "comparison.md", "cells.parquet"):
        assert (directory / name).stat().st_size > 0
        assert str(directory / name) in result.output
    assert len(list(directory.glob("*.png"))) == len(list(directory.glob("*.svg"))) == 2


def test_table_prints_markdown(records: list[Record], tmp_path: Path) -> None:
    records_file = write_records(records, tmp_path / "records.jsonl")
    result = called("table", records_file, "--markdown")
    assert result.output.startswith("| Model | Tuning | Link | Strategy |")
    assert "| gpt2-4x128 | full | 10 Mbit/s | FCDP |" in result.output
    assert "\n- speed-up" in result.output
    # The default baseline needs no records.
    write_records([r for r in records if r.cell.strategy != "deepspeed-zero3"], records_file)
    called("table", records_file)


#: Files that are no records, nor traces.
FILES = {"empty": b"", "object": b"{}\n", "words": b"not json\n", "bytes": b"\xff\n"}
#: Commands, and below each how its error begins; HERE is the folder that it is called in.
MISTAKES = cases(Path(__file__).with_name("mistakes.txt"))


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_message_and_status_2(
    line: str, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    write_records(records, tmp_path / "records.jsonl")
    simulated = records[0].model_copy(update={"evidence": "simulated"})
    write_records([simulated], tmp_path / "simulated.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("analysis.__main__.RESULTS", tmp_path / "none")
    result = called(*line.split(), status=2)
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)
    (message,) = MISTAKES[line]
    assert result.stderr.startswith(f"error: {message}".replace("HERE", str(tmp_path)))
    assert result.stderr.count("\n") == 1


@pytest.mark.ranks
def test_help_does_not_wait_for_pandas() -> None:
    code = "import sys, analysis.__main__; sys.exit('pandas' in sys.modules)"
    programs.printed(sys.executable, "-c", code)
