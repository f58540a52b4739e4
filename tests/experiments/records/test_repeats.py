"""Repetitions count as one cell."""

from __future__ import annotations

import pytest

from analysis.load.table import latest
from experiments.records.record import Machine, Record
from experiments.records.repeats import pooled
from tests.experiments.stand_in import cell, record


def repetitions(*steps: list[float], **settings: str) -> list[Record]:
    return [
        record(cell(**settings, repeat=number), step_seconds=seconds)
        for number, seconds in enumerate(steps)
    ]


def test_a_repetition_is_a_cell_of_its_own_and_says_which() -> None:
    first, second = repetitions([1.0], [2.0])
    assert second.cell_id == f"{first.cell_id}-r2"


def test_repetitions_are_one_record_with_all_steps() -> None:
    ours, theirs = repetitions([1.0, 1.1], [3.0]), repetitions([9.0], policy="disk")
    one, other = pooled([ours[0], theirs[0], ours[1]])
    assert one.measurement is not None
    assert one.measurement.step_seconds == [1.0, 1.1, 3.0]
    assert (one.cell, one.cell_id, one.seconds) == (ours[0].cell, ours[0].cell_id, 24.0)
    assert other == theirs[0]
    assert [kept.cell_id for kept in latest([*ours, *theirs])] == [one.cell_id, other.cell_id]


def test_phases_are_the_mean_of_all_repetitions() -> None:
    ran = [
        record(cell(repeat=number), phase_seconds={"forward": seconds})
        for number, seconds in enumerate((1.0, 2.0))
    ]
    (one,) = pooled(ran)
    assert one.measurement is not None
    assert one.measurement.phase_seconds == {"forward": 1.5}


def test_a_repetition_that_failed_does_not_take_the_others_along() -> None:
    failed = record(cell(repeat=0), "failed", "an error")
    ran = record(cell(repeat=1), step_seconds=[1.0])
    busy = Machine(load=0.1, cores=2, steal_share=0.4)
    (one,) = pooled([failed, ran.model_copy(update={"machine": busy})])
    assert (one.state, one.cell_id, one.machine) == ("ok", failed.cell_id, busy)


def test_a_round_that_had_not_ended_is_left_out_between_repetitions() -> None:
    ran = [
        record(cell(repeat=number), step_seconds=[1.0, 3.0, 100.0], steps_per_round=2)
        for number in range(2)
    ]
    (one,) = pooled(ran)
    assert one.measurement is not None
    assert one.measurement.round_seconds == [2.0, 2.0]


@pytest.mark.parametrize(
    ("load", "steal", "said"),
    [
        (0.9, 0.01, None),
        (1.5, 0.0, "a load of 1.5 on 2 cores"),
        (0.0, 0.31, "31% of the processors' time taken by its host"),
    ],
)
def test_a_busy_machine_says_so(load: float, steal: float, said: str | None) -> None:
    assert Machine(load=load, cores=2, steal_share=steal).why_busy == said
