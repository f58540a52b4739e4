"""The matrices of the repository: all strategies have their place in them."""

from __future__ import annotations

import pytest

from baselines.registry import SIBLINGS, STRATEGIES
from experiments.matrix import files, reader
from experiments.records.workload import NEEDED


@pytest.mark.parametrize("name", files.available())
def test_matrices_of_the_repository(name: str) -> None:
    expanded = reader.read(name)
    assert expanded.name == name
    cells = [
        entry.cell
        for entry in expanded.cells
        if entry.skip_reason is None or entry.skip_reason.startswith(NEEDED)
    ]
    names = {cell.strategy for cell in cells}
    if not names & {of.name for of in SIBLINGS}:  # which are held against themselves too
        assert "fcdp" in names
    assert len({(cell.variant, cell.choices, cell.micro_batch) for cell in cells}) > 1


@pytest.mark.parametrize("name", ["baselines", "parity"])
def test_matrices_of_all_strategies_leave_none_out(name: str) -> None:
    """A new strategy belongs into them; systems of other papers have matrices of their own."""
    strategies = [entry.cell.strategy for entry in reader.read(name).cells]
    assert set(strategies) == {of.name for of in STRATEGIES} - {of.name for of in SIBLINGS}


def test_reference_accumulates_at_100_mbit_only() -> None:
    accumulating = [
        entry.cell
        for entry in reader.read("reference").cells
        if entry.cell.accumulation == 4 and entry.skip_reason is None
    ]
    assert {cell.inter_bandwidth_bits_per_s for cell in accumulating} == {100_000_000}
    assert {cell.strategy for cell in accumulating} == {"deepspeed-zero3", "fsdp2", "fcdp"}
