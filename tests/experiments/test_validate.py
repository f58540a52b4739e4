"""``python -m experiments validate`` on committed records."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.records import read
from experiments.validate import PREDICTIONS

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(RESULTS / "slow-link" / "records.jsonl", tmp_path)
    return tmp_path


def test_every_cell_that_ran_is_predicted(folder: Path) -> None:
    for _ in range(2):  # the second time anew, not once more
        result = CliRunner().invoke(app, ["validate", str(folder)])
        assert result.exit_code == 0, result.output
        ran, predicted = (read(folder / file) for file in ("records.jsonl", PREDICTIONS))
        assert [record.cell_id for record in predicted] == [record.cell_id for record in ran]
        assert {record.evidence for record in predicted} == {"simulated"}
    assert "unshaped" in result.output
    assert "limited" in result.output


def test_simulated_cells_are_no_evidence(folder: Path) -> None:
    file = folder / "records.jsonl"
    emulated, simulated = ('"evidence":"emulated"', '"evidence":"simulated"')
    file.write_text(file.read_text("utf-8").replace(emulated, simulated), "utf-8")
    result = CliRunner().invoke(app, ["validate", str(folder)])
    assert result.exit_code == 2
    assert "no cell of an emulated cluster" in result.output
    assert not (folder / PREDICTIONS).exists()


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(tmp_path)])
    assert result.exit_code == 2
    assert "records.jsonl" in result.output
