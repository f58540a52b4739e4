"""Ablations have the committed records' table, and the reference names every command."""

from __future__ import annotations

import re

from docs import draw_ablation
from experiments.commands import COMMANDS
from experiments.matrix import reader
from experiments.records.record import read
from tests.docs import DOCS, ROOT

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


def test_the_reference_has_all_commands() -> None:
    named = set(re.findall(r"`([a-z][a-z-]+)", REFERENCE))
    assert set(COMMANDS) <= named
