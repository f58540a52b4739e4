"""Settings of the command line take the place of those of a matrix file."""

from pathlib import Path
from typing import Any

from experiments.matrix import reader
from experiments.matrix.files import parse
from experiments.records.cell import Cell
from experiments.records.settings import described
from tests.experiments.stand_in import matrix_file


def values(cells: list[Cell], name: str) -> list[Any]:
    return list(dict.fromkeys(described(Cell)[name].of(cell) for cell in cells))


def cells_of(name: str, *given: str) -> list[Cell]:
    return [*reader.read(name, changes=parse(given)).cells]


def test_a_value_takes_the_place_of_the_workloads_and_of_overrides() -> None:
    cells = cells_of("quickstart", "steps=10")
    assert values(cells, "steps") == [10]
    assert len(cells) == len(reader.read("quickstart").cells)
    # A list is an axis, and a value an axis of one.
    cells = cells_of("ablation", "steps=[1, 2]", "policy=disk", "accumulation=[2]")
    assert (values(cells, "steps"), values(cells, "policy")) == ([1, 2], ["disk"])
    assert values(cells, "accumulation") == [2]
    # Either may have calls with commas.
    call = "budget(device=1 MiB, host=2 MiB)"
    assert values(cells_of("ablation", f"policy=[host, {call}]"), "policy") == ["host", call]
    assert values(cells_of("ablation", f"policy={call}"), "policy") == [call]


def test_rules_about_values_that_are_gone_are_gone(tmp_path: Path) -> None:
    rules = """\
        skip:
          - {when: {inter_bandwidth: 10 Mbit/s}, reason: too slow}
        overrides:
          - {when: {inter_bandwidth: 10 Mbit/s}, set: {steps: 1}}
        first:
          - {when: {inter_bandwidth: 10 Mbit/s}}
        """
    file = str(matrix_file(tmp_path, extra=rules))
    matrix = reader.read(file, changes=parse(["inter_bandwidth=1Gbps"]))
    assert (len(matrix.cells), matrix.skipped) == (3, {})
    assert values([*matrix.cells], "steps") == [2]
