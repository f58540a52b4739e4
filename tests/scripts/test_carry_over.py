"""Records of before settings had types of their own keep all that they say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.carry_over import carried_over
from tests.experiments.stand_in import cell, record

_FLAT = {
    "policy": "host",
    "gather_codec": "none",
    "reduce_codec": "none",
    "error_feedback": False,
    "adapters": "sharded",
    "deepspeed": "current",
}


def flat(strategy: str, state: str = "ok", **settings: Any) -> str:
    """A line as it was, with every strategy's settings in every cell."""
    made = record(cell(strategy=strategy, **settings))
    content = json.loads(made.model_dump_json()) | {"state": state}
    del content["cell"]["settings"]
    content["cell"] |= _FLAT | settings
    return json.dumps(content)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("fcdp", {"policy": "disk", "reduce_codec": "int8", "error_feedback": True}),
        ("deepspeed-hpz", {"deepspeed": "paper"}),
        ("fsdp2", {}),
    ],
)
def test_a_record_keeps_its_id_and_its_settings(strategy: str, settings: dict[str, Any]) -> None:
    (made,) = carried_over([flat(strategy, **settings)])
    assert made.cell == cell(strategy=strategy, **settings)
    assert made.cell_id == made.cell.id
    assert list(carried_over([made.model_dump_json()])) == [made]


def test_skipped_cells_that_are_no_cells_of_their_own_are_dropped() -> None:
    assert list(carried_over([flat("fsdp2", "skipped", policy="disk")])) == []


def test_what_ran_with_a_setting_that_it_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ran with {'policy': 'disk'}, which it does not have"):
        list(carried_over([flat("fsdp2", policy="disk")]))


def test_an_id_of_before_ids_named_choices_is_renamed_and_nothing_else_is_changed() -> None:
    made = record(cell(strategy="fcdp", policy="threshold(0.8)"))
    older = made.model_copy(
        update={"cell_id": made.cell_id.replace("fcdp-threshold-0.8-", "fcdp-")}
    )
    assert older.cell_id != made.cell_id
    assert list(carried_over([older.model_dump_json()])) == [made]


def test_another_id_is_refused() -> None:
    content = json.loads(flat("fcdp")) | {"cell_id": "fcdp-of-another-time"}
    with pytest.raises(ValueError, match="fcdp-of-another-time: would become fcdp-"):
        list(carried_over([json.dumps(content)]))
