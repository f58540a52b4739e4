"""Ablations have the committed records' table and figure, and their commands are real."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from docs import draw_ablation
from experiments.__main__ import app
from experiments.commands import COMMANDS
from experiments.matrix import reader
from experiments.records.record import read
from tests.docs import DOCS, ROOT

PAGE = (DOCS / "measurements.md").read_text(encoding="utf-8")
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")
TABLES = (ROOT / "results/tables.md").read_text(encoding="utf-8")


def test_the_records_are_those_of_the_matrix() -> None:
    ran = [record.cell_id for record in read(draw_ablation.RECORDS)]
    cells = [entry.cell for entry in reader.read("ablation").cells]
    assert ran == [cell.id for cell in cells]
    assert len({cell.subject for cell in cells}) == 7
    assert {cell.accumulation for cell in cells} == {1, 4}


def test_the_table_has_both_policies_in_both_parts() -> None:
    rows = [line for line in TABLES.splitlines() if line.startswith(("| none |", "| host |"))]
    assert len(rows) == 4


@pytest.mark.parametrize(
    "command", re.findall(r"^python -m experiments ((?:show|compare) .+)$", PAGE, re.MULTILINE)
)
def test_the_pages_commands_show_what_is_committed(command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert "fcdp-" in result.output


def test_the_reference_has_all_commands() -> None:
    named = set(re.findall(r"`([a-z][a-z-]+)", REFERENCE))
    assert set(COMMANDS) <= named
