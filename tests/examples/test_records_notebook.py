"""The notebook that reads records: its cells run from any folder, and leave nothing in the file."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.docs import ROOT

NOTEBOOK = json.loads((ROOT / "examples" / "records.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_outputs() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert {cell["cell_type"] for cell in NOTEBOOK["cells"]} == {"markdown", "code"}
    assert [cell for cell in CODE if cell["outputs"] or cell["execution_count"]] == []


@pytest.fixture(scope="module")
def scope(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the cells define, run one after another in another folder."""
    namespace: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for number, cell in enumerate(CODE):
            source = "".join(cell["source"])
            exec(compile(source, f"cell {number}", "exec", dont_inherit=True), namespace)
    return namespace


def test_its_cells_run_and_say_what_the_records_say(scope: dict[str, Any]) -> None:
    compared: pd.DataFrame = scope["compared"]
    assert len(compared) == 14
    assert set(compared["baseline"]) == {"fcdp none"}
    assert compared["speed_up"].notna().all()
    assert {drawing.matrix for drawing in scope["drawings"]} == {"ablation"}
    assert len(scope["predicted"]) == len(scope["timed"]) == 14


def test_it_does_not_name_this_machine() -> None:
    text = (ROOT / "examples" / "records.ipynb").read_text(encoding="utf-8")
    assert str(Path.home()) not in text
    assert str(ROOT) not in text
