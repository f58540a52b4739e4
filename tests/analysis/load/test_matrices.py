"""What matrices' files say of their cells is what the cells are."""

from __future__ import annotations

import pytest

from analysis.load import matrices
from experiments.matrix import files
from experiments.matrix import reader as expanded
from simulation.quantities import format_link


def test_every_matrix_is_there() -> None:
    assert list(matrices.named()) == files.available()


@pytest.mark.parametrize("name", ["reference", "parity", "slow-link", "tau-batch"])
def test_names_are_those_of_the_cells(name: str) -> None:
    cells = [entry.cell for entry in expanded.read(name).cells]
    assert matrices.names(name) == {
        "strategy": {cell.strategy for cell in cells},
        "model": {cell.model.name for cell in cells},
        "link": {format_link(cell.inter_bandwidth_bits_per_s) for cell in cells},
    }


def test_a_matrix_without_a_file_may_have_any_strategy_and_models_of_its_own() -> None:
    (strategies,) = matrices.names("memory").values()
    assert all(of["strategy"] <= strategies for of in matrices.named().values())
