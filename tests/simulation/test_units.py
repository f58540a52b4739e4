"""Units of a block; imitated/test_units.py compares all with those of the library."""

from dataclasses import replace

from simulation.units import layout
from tests.simulation.workloads import workload


def test_what_there_is_more_of_keeps_the_blocks_unit() -> None:
    small = workload("fcdp", lora=True)
    large = replace(small, lora=small.model.lora(4 * small.model.width))
    names = [[unit.name for unit in layout(each, 2, 8).units] for each in (small, large)]
    assert names[0] == ["root", "block 0", "adapters 0", *(f"block {at}" for at in range(1, 6))]
    assert names[1] == ["root", *(f"{of} {at}" for at in range(6) for of in ("block", "frozen"))]
    of_blocks = layout(large, 2, 8).units[1::2]
    assert all(unit.trained for unit in of_blocks)


def test_other_strategies_keep_a_block_together() -> None:
    whole = layout(workload("fsdp2", lora=True), 2, 8).units
    assert len(whole) == 1 + 6
    assert all(0 < unit.trained < unit.gathered for unit in whole[1:])
