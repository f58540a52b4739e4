"""Rates of computation: fitted constants are found again, and published runs predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulation import compute
from simulation.compute import ROWS, Fitted, Row, Run, Shares, fit, read_rows, run_of
from simulation.hardware import CARDS

RUNS = [run_of(row) for row in read_rows() if row.bf16]
RECORD = compute.read()
TRUE = Fitted(
    {gpu: Shares(0.8, 0.3, 0.5) for gpu in {run.row.gpu for run in RUNS}},
    exchange_passes=9.0,
    lost_with_scale=0.05,
)


def made(run: Run) -> Run:
    """The run as it would be on GPUs of the rates ``TRUE``."""
    speed = compute.tokens_per_gpu_s(run, TRUE)
    return replace(run, row=run.row.model_copy(update={"tokens_per_s_per_gpu": speed}))


def test_constants_are_found_again() -> None:
    found = fit([made(run) for run in RUNS]).numbers()
    for name, value in TRUE.numbers().items():
        tolerance = 0.25 if name in ("exchange passes", "lost with scale") else 0.1
        assert found[name] == pytest.approx(value, rel=tolerance), name


def test_the_record_is_of_the_committed_rows_and_of_this_code() -> None:
    rows = [row for row in read_rows() if row.bf16]
    assert [one.row for one in RECORD.predictions] == rows
    again = fit(RUNS).numbers()
    for constant in RECORD.constants:
        assert constant.value == pytest.approx(again[constant.name], rel=1e-3)
        assert constant.low <= constant.value <= constant.high
    for one, run in list(zip(RECORD.predictions, RUNS, strict=True))[::9]:
        assert compute.tokens_per_gpu_s(run, RECORD.fitted()) == pytest.approx(one.fitted, rel=1e-3)


@pytest.mark.parametrize("what", ["the other half of the sizes", "each size", "each length"])
def test_rows_that_the_fit_has_not_seen_are_predicted(what: str) -> None:
    check = RECORD.check(what)
    assert check.rows == len(RUNS)
    assert check.median <= 0.07
    assert check.nine_of_ten <= 0.15


def test_both_halves_are_held_out() -> None:
    sizes = {run.row.model for run in RUNS}
    assert sizes - compute.HALF
    assert sizes & compute.HALF == compute.HALF
    seen = fit([run for run in RUNS if run.row.model in compute.HALF])
    for one, run in zip(RECORD.predictions, RUNS, strict=True):
        if run.row.model not in compute.HALF:
            assert one.held_out == pytest.approx(compute.tokens_per_gpu_s(run, seen), rel=1e-3)


@pytest.mark.parametrize(
    "half", [{"125m", "350m", "3b"}, {"125m", "70b", "7b"}], ids=lambda half: "-".join(sorted(half))
)
def test_other_halves_hold_too(half: set[str]) -> None:
    """The first has H100s of one size alone, which do not tell their bytes from their products."""
    runs = [run_of(row) for row in read_rows() if row.bf16]
    found = fit([run for run in runs if run.row.model in half])
    unseen = [run.row for run in runs if run.row.model not in half]
    check = compute.errors(unseen, found)
    assert check.median < 0.07
    assert check.nine_of_ten < 0.15


def test_given_rows_are_checked_by_committed_constants() -> None:
    found = compute.errors(read_rows(), RECORD.fitted())
    assert found.median == pytest.approx(RECORD.check("all rows, fitted").median, abs=1e-3)
    with pytest.raises(ValueError, match="rows: hold none in bf16"):
        compute.errors([row for row in read_rows() if not row.bf16], RECORD.fitted())


def test_a_mistake_in_a_row_names_its_line(tmp_path: Path) -> None:
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([*lines[:2], lines[2].replace("256,2048", "0,2048")]) + "\n")
    with pytest.raises(ValueError, match=r"rows\.csv:3: gpus: "):
        read_rows(file)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: 3 were given, 5 constants need as many"):
        fit(RUNS[:3])


def test_gpus_fill_nodes() -> None:
    row: Row = RUNS[0].row.model_copy(update={"gpus": 12})
    with pytest.raises(ValueError, match="gpus = 12: must be a multiple of 8"):
        run_of(row)


def test_gpus_of_the_rows_are_known() -> None:
    assert {run.row.gpu for run in RUNS} <= set(CARDS)
