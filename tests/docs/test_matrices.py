"""Matrix files: keys of the reference are the reader's and the types'; one of two groups is one."""

from __future__ import annotations

from pathlib import Path

from experiments.matrix import reader
from experiments.matrix.reader import SETTINGS, MatrixFile
from tests.docs import DOCS, block, table

REST = """
name: groups
description: of the page
models:
  - {name: gpt2-a, family: gpt2, layers: 2, width: 16, heads: 2}
"""
CONSTANTS = """\
  model: gpt2-a
  tuning: full
  sequence_length: 16
  micro_batch: 1
  accumulation: 1
  dtype: float32
  lora_rank: 4
  learning_rate: 0.001
  warmup_steps: 1
  steps: 5
  timeout_s: 60
"""


def test_the_keys_of_the_file_are_the_readers() -> None:
    keys = [row["Key"].strip("`") for row in table("reference.md", "top")]
    required = [name for name, key in MatrixFile.model_fields.items() if key.is_required()]
    assert keys[: len(required)] == required
    assert sorted(keys) == sorted(MatrixFile.model_fields)


def test_every_setting_has_a_line_that_says_what_it_takes() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    for setting in SETTINGS:
        assert f"\n- `{setting}` (" in text
    assert "` ()" not in text, "a setting says nothing of itself"


def test_the_matrix_of_two_groups_expands(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    file.write_text(REST + block("strategies.md", "groups") + CONSTANTS, encoding="utf-8")
    cells = [entry.cell for entry in reader.read(str(file)).cells]
    assert [(cell.strategy, cell.links) for cell in cells] == [
        (strategy, (10**9, link)) for link in (10**8, 10**7) for strategy in ("fcdp", "co2")
    ]
    assert {getattr(cell.settings, "nodes_per_worker", None) for cell in cells} == {None, 2}
    predicted = reader.read(str(file), simulated=True).cells
    reason = "is not simulated: between its nodes there are two kinds of links"
    assert {entry.skip_reason for entry in predicted} == {reason}
