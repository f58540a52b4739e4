"""Parameters that leave a block's unit, and which of them stay gathered, by bytes."""

from dataclasses import replace

import pytest

from simulation.models import shape
from simulation.units import Unit, layout
from simulation.workload import Workload
from tests.simulation.workloads import workload

LENGTH = 2048


def adapters_of(rank: int, frozen: str, **more: object) -> list[Unit]:
    """Units of Llama-3-8B's adapters, on two nodes of eight ranks."""
    model = shape("llama-3-8b", LENGTH)
    given = Workload(
        strategy="fcdp", model=model, lora=model.lora(rank), sequence_length=LENGTH, micro_batch=1
    )
    units = layout(replace(given, frozen_dtype=frozen, **more), 2, 8).units  # type: ignore[arg-type]
    return [unit for unit in units if unit.trained]


@pytest.mark.parametrize(
    ("rank", "frozen", "count", "stay"),
    [
        (8, "fp32", 2, True),
        (16, "bf16", 3, True),
        (24, "fp32", 4, True),
        (24, "bf16", 32, False),
        (32, "fp32", 5, True),
        (32, "bf16", 32, False),
    ],
)
def test_adapters_stay_gathered_by_their_bytes(
    rank: int, frozen: str, count: int, stay: bool
) -> None:
    units = adapters_of(rank, frozen)
    assert len(units) == count
    assert {unit.stays_gathered for unit in units} == {stay}
    assert sum(unit.parameters for unit in units) == 32 * 26_624 * rank


def test_adapters_in_bf16_take_half_a_bucket() -> None:
    narrow = adapters_of(24, "bf16", states="bf16")
    assert len(narrow) == 2
    assert all(unit.stays_gathered for unit in narrow)


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
