"""A cell has six forms from a matrix file to its record: those that CONTRIBUTING lists."""

import re
import sys

import pytest

from tests import programs
from tests.programs import ROOT

#: Prints the classes, among all that a run's command and its ranks import, that hold a cell or
#: repeat five or more of its settings, each with its file.
FORMS = """
import dataclasses, sys
import experiments.commands.run, experiments.worker.worker
from experiments.records.cell import Cell

ours = ("fcdp.", "baselines.", "simulation.", "experiments.")
for module in [each for name, each in sys.modules.items() if name.startswith(ours)]:
    for kind in vars(module).values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        types = {name: each.annotation for name, each in getattr(kind, "model_fields", {}).items()}
        if dataclasses.is_dataclass(kind):
            types = {each.name: each.type for each in dataclasses.fields(kind)}
        repeated = types.keys() & Cell.model_fields.keys()
        if len(repeated) >= 5 or any(each in (Cell, "Cell") for each in types.values()):
            print(kind.__name__, module.__name__.replace(".", "/") + ".py")
"""


@pytest.mark.ranks
def test_the_forms_of_a_cell_are_those_of_the_list() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## A cell, from a matrix file to its record\n")
    rows = re.findall(r"^\| `(\w+)` \| \[(\S+\.py)\]", section.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) == 6
    for name, file in rows:
        assert f"\nclass {name}" in (ROOT / file).read_text(encoding="utf-8"), name
    shown = programs.printed(sys.executable, "-c", FORMS).splitlines()
    found = {tuple(line.split()) for line in shown}
    # A file's values, and a run's figures, repeat no settings.
    assert {*rows} - found == {
        ("Document", "simulation/yaml_lines.py"),
        ("Measurement", "experiments/records/record.py"),
    }
    assert found <= {*rows}
