"""What comes next, told from the pass before."""

from __future__ import annotations

from typing import Any

from fcdp.cache.cache import GatherOrder

PASS: Any = ["a", "b", "c", "b", "a"]


def run(order: GatherOrder, units: Any, depth: int = 2, gradients: bool = True) -> list[str]:
    order.begin(gradients)
    return ["".join(map(str, order.follow(unit, depth))) for unit in units]


def test_the_first_pass_is_learnt_and_the_second_foreseen() -> None:
    order = GatherOrder()
    assert run(order, PASS) == [""] * 5
    assert run(order, PASS) == ["bc", "cb", "ba", "a", ""]


def test_a_pass_that_goes_another_way_foresees_nothing_from_there() -> None:
    order = GatherOrder()
    run(order, PASS)
    assert run(order, ["a", "c", "c", "b", "a", "b"]) == ["bc", "", "ba", "a", "", ""]


def test_forwards_that_gather_nothing_do_not_erase_what_is_known() -> None:
    order = GatherOrder()
    run(order, PASS)
    order.begin(True)
    assert run(order, PASS, depth=1) == ["b", "c", "b", "a", ""]


def test_an_evaluation_between_steps_makes_no_step_unknown() -> None:
    order = GatherOrder()
    run(order, PASS)
    assert run(order, "abc", gradients=False) == [""] * 3
    assert run(order, PASS) == ["bc", "cb", "ba", "a", ""]
    assert run(order, "abc", gradients=False) == ["bc", "c", ""]
