"""Cells are picked by settings or by ids, of all committed matrices."""

import pytest

from experiments.records.select import chosen
from tests.experiments.stand_in import cell

CELLS = [
    cell(policy="none"),
    cell(policy="disk"),
    cell(policy="disk", accumulation=4),
    cell(policy="budget(device=1 MiB, host=2 MiB)", inter_bandwidth_bits_per_s=None),
    cell(strategy="fsdp2"),
]


@pytest.mark.parametrize(
    ("pattern", "indices"),
    [
        ("policy=disk", [1, 2]),
        ("policy=disk,k=4", [2]),
        ("policy=disk, accumulation=1", [1]),
        ("policy=none,policy=disk,k=1", [0, 1]),
        ("model=llama-4x128,nodes=2,k=4", [2]),
        ("policy=budget(device=1 MiB, host=2 MiB)", [3]),
        ("link=unshaped", [3]),
        ("link=0.1Gbps,strategy=fsdp2", [4]),
        ("disk", [1, 2]),
        ("fsdp2-*", [4]),
    ],
)
def test_cells_are_those_of_the_pattern(pattern: str, indices: list[int]) -> None:
    assert chosen(CELLS, pattern) == [CELLS[at] for at in indices]
