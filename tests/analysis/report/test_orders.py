"""Pairs of cells and the simulator's choice, next to what was run; pages have the others."""

import pytest

from analysis.report import simulator
from experiments.records.record import Record
from tests.analysis import made_up

#: Timed seconds of a step by strategy; each cell's steps are as far apart as ``SPREAD`` says.
TIMED = {"deepspeed-zero3": 2.0, "fsdp2": 1.5, "fcdp": 1.0}
SPREAD = 0.02


def records(seconds: dict[str, float], spread: float = SPREAD) -> list[Record]:
    """One cell per strategy, with steps of about these seconds."""
    return [
        made_up.record(
            made_up.cell(strategy),
            step_seconds=[middle * (1 + spread * at) for at in (-1, -0.5, 0, 0.5, 1)],
        )
        for strategy, middle in seconds.items()
    ]


def order(predicted: dict[str, float], spread: float = SPREAD) -> simulator.Order:
    return simulator.order("made-up", records(TIMED, spread), records(predicted, 0.0), True)


def test_a_wrong_choice_costs_what_it_is_slower() -> None:
    ordering = order({"deepspeed-zero3": 3.0, "fsdp2": 1.0, "fcdp": 2.0})
    assert (ordering.pairs, ordering.right) == (3, 2)
    assert ordering.costs == (pytest.approx(0.5),)


def test_of_cells_that_are_predicted_alike_the_slowest_is_taken() -> None:
    ordering = order({"deepspeed-zero3": 1.0, "fsdp2": 1.0, "fcdp": 1.0})
    assert ordering.right == 0
    assert ordering.costs == (pytest.approx(1.0),)


def test_cells_within_each_others_interval_are_no_pair() -> None:
    assert order(TIMED, spread=0.3).pairs == 1  # the fastest and the slowest alone
    close = {"deepspeed-zero3": 1.1, "fsdp2": 1.05, "fcdp": 1.0}
    ordering = simulator.order("made-up", records(close), records(close, 0.0), readable=True)
    assert ordering.pairs == 0
