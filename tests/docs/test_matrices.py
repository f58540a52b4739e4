"""Matrix files: the reference has the reader's keys, and the example of two groups expands."""

from pathlib import Path

import yaml

from experiments.matrix import reader
from experiments.matrix.reader import SETTINGS, MatrixFile
from tests.docs import DOCS, block, table
from tests.experiments.stand_in import matrix_file


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
    file = matrix_file(tmp_path)
    small, of_the_page = (
        yaml.safe_load(text) for text in (file.read_text(), block("strategies.md", "groups"))
    )
    of_the_page["workload"] |= small["workload"]
    file.write_text(yaml.safe_dump(small | of_the_page), encoding="utf-8")
    cells = reader.read(str(file)).cells
    assert [(cell.strategy, cell.links) for cell in cells] == [
        (strategy, (10**9, link)) for link in (10**8, 10**7) for strategy in ("fcdp", "co2")
    ]
    assert {getattr(cell.settings, "nodes_per_worker", None) for cell in cells} == {None, 2}
    predicted = reader.read(str(file), simulated=True)
    reason = "is not simulated: between its nodes there are two kinds of links"
    assert {*predicted.skipped.values()} == {reason}
    assert not predicted.running
