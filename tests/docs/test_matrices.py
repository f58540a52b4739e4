"""docs/matrices.md: the keys of the file are the reader's, those of its parts are the types'."""

from __future__ import annotations

from experiments.matrix.reader import SETTINGS, MatrixFile
from scripts.readme import ROOT
from tests.docs import table

PAGE = "docs/matrices.md"


def test_the_keys_of_the_file_are_the_readers() -> None:
    keys = [row["Key"].strip("`") for row in table("matrices.md", "top")]
    required = [name for name, key in MatrixFile.model_fields.items() if key.is_required()]
    assert keys[: len(required)] == required
    assert sorted(keys) == sorted(MatrixFile.model_fields)


def test_every_setting_has_a_row_that_says_something() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for setting in SETTINGS:
        assert f"\n| `{setting}` | " in text
    assert "|  |\n" not in text.partition("## Cluster")[0], "a setting says nothing of itself"
