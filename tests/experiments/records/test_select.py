"""Cells are picked by settings or by ids, of all committed matrices."""

import pytest

from experiments.records.select import chosen
from tests.experiments.golden import tables
from tests.experiments.stand_in import cell

CELLS = [
    cell(policy="none"),
    cell(policy="disk"),
    cell(policy="disk", accumulation=4),
    cell(policy="budget(device=1 MiB, host=2 MiB)", inter_bandwidth_bits_per_s=None),
    cell(strategy="fsdp2"),
]


@pytest.mark.parametrize(("pattern", "indices"), tables(__file__).items())
def test_cells_are_those_of_the_pattern(pattern: str, indices: list[int]) -> None:
    assert chosen(CELLS, pattern) == [CELLS[at] for at in indices]
