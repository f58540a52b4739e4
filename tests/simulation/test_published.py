"""Published steps that no fit has seen: refusals of pipelines; what networks reach."""

from dataclasses import replace

import pytest

from simulation import calibration, compute, published
from simulation.compute import read_rows, run_of
from simulation.hardware import FABRICS
from simulation.published import seconds
from tests.programs import ROOT

HELD_OUT = compute.ROWS.with_name("held-out.csv")


def test_passes_that_lack_are_named() -> None:
    steps, passes = published.read()
    other = steps[0].model_copy(update={"micro_batch": 64})
    with pytest.raises(ValueError, match=r"passes\.csv: has none of opt-350m, .*, 2, 64"):
        seconds(other, passes)


def test_rows_that_no_fit_sees_are_of_other_sources_and_as_the_page_says() -> None:
    rows = read_rows(HELD_OUT)
    assert not {row.source for row in rows} & {row.source for row in read_rows()}
    check = calibration.errors(rows, compute.read().fitted())
    assert check.median <= 0.08
    assert check.nine_of_ten <= 0.2
    shown = (
        f"{100 * check.median:.1f} % in\nthe median, nine of ten to {100 * check.nine_of_ten:.1f} %"
    )
    assert shown in (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_a_row_that_waits_for_its_network_says_what_tcp_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = (of for of in read_rows(HELD_OUT) if of.accumulation == 4)
    fitted = compute.read().fitted()
    assert calibration.errors([row], fitted).worst < 0.2
    limited = compute.run_of(row).hardware
    free = {**FABRICS, "tcp": replace(FABRICS["tcp"], most_bits_per_s=1e15)}
    monkeypatch.setattr("simulation.hardware.FABRICS", free)
    assert run_of(row).hardware.inter_bytes_per_s > 2 * limited.inter_bytes_per_s
    assert calibration.errors([row], fitted).worst > 0.5
