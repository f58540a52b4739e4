"""Predictions, pairs of cells and the simulator's choice, next to what was run."""

from operator import itemgetter

import pytest

from analysis.report import simulator
from experiments.records.record import Machine, Record
from tests.analysis import made_up

#: Timed seconds of a step by strategy; each cell's steps are as far apart as ``SPREAD`` says.
TIMED = {"deepspeed-zero3": 2.0, "fsdp2": 1.5, "fcdp": 1.0}
SPREAD = 0.02


def records(seconds: dict[str, float], spread: float = SPREAD, **changes: object) -> list[Record]:
    """One cell per strategy, with steps of about these seconds."""
    return [
        made_up.record(
            made_up.cell(strategy),
            step_seconds=[middle * (1 + spread * at) for at in (-1, -0.5, 0, 0.5, 1)],
            **changes,
        )
        for strategy, middle in seconds.items()
    ]


def order(
    predicted: dict[str, float], spread: float = SPREAD, readable: bool = True
) -> simulator.Order:
    return simulator.order("made-up", records(TIMED, spread), records(predicted, 0.0), readable)


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


def test_the_report_has_bad_rows_and_says_which_times_may_be_read() -> None:
    busy = Machine(load=14.0, cores=2, steal_share=0.0)
    loud = simulator.order(
        "loud", records(TIMED, machine=busy), records({**TIMED, "fcdp": 9.0}, 0.0), readable=True
    )
    assert not loud.quiet
    quiet, unread = order(TIMED), order(TIMED, readable=False)
    assert quiet.quiet
    assert not unread.quiet
    *matrices, readable, total = simulator.choices([quiet, loud])
    assert [row["right"] for row in matrices] == ["3 (100.0 %)", "1 (33.3 %)"]
    shown = itemgetter("pairs", "right", "largest_cost")
    assert shown(readable) == (3, "3 (100.0 %)", "0 %")
    assert shown(total) == (6, "4 (66.7 %)", "50 %")


def test_only_cells_that_were_predicted_are_compared() -> None:
    timed = made_up.records()
    predicted = [
        record.model_copy(update={"evidence": "simulated"})
        for record in timed
        if record.measurement is not None
    ]
    assert len(simulator.joined("made-up", timed, predicted[:5])) == 5
