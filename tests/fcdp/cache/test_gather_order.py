"""What comes next, told from the pass before."""

from __future__ import annotations

from typing import Any

from fcdp.cache.gather_order import Schedule

PASS: Any = ["a", "b", "c", "b", "a"]


def run(schedule: Schedule, units: Any, depth: int = 2) -> list[str]:
    schedule.begin()
    return ["".join(map(str, schedule.follow(unit, depth))) for unit in units]


def test_the_first_pass_is_learnt_and_the_second_foreseen() -> None:
    schedule = Schedule()
    assert run(schedule, PASS) == [""] * 5
    assert run(schedule, PASS) == ["bc", "cb", "ba", "a", ""]


def test_a_pass_that_goes_another_way_foresees_nothing_from_there() -> None:
    schedule = Schedule()
    run(schedule, PASS)
    assert run(schedule, ["a", "c", "c", "b", "a", "b"]) == ["bc", "", "ba", "a", "", ""]


def test_forwards_that_gather_nothing_do_not_erase_what_is_known() -> None:
    schedule = Schedule()
    run(schedule, PASS)
    schedule.begin()
    assert run(schedule, PASS, depth=1) == ["b", "c", "b", "a", ""]
