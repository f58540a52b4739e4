"""Predictions next to what was run."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.report import simulator
from experiments.records.record import Record
from tests.analysis import made_up

RECORDS = made_up.records()


def predicted(factor: float, more_bytes: float = 0.0) -> list[Record]:
    """What was timed, so many times as slow, with so many bytes more."""
    found = []
    for record in RECORDS:
        if record.measurement is None:
            continue
        changed = {
            "step_seconds": [factor * (record.step_seconds_median or 0.0)],
            "inter_node_bytes_per_step": record.measurement.inter_node_bytes_per_step + more_bytes,
        }
        measurement = record.measurement.model_copy(update=changed)
        found.append(
            record.model_copy(update={"evidence": "simulated", "measurement": measurement})
        )
    return found


def pairs(factor: float, more_bytes: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(simulator.joined("made-up", RECORDS, predicted(factor, more_bytes)))


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_errors_are_relative_to_what_was_timed(factor: float) -> None:
    assert simulator.median_error(pairs(factor)) == pytest.approx(abs(factor - 1))
    limited, unshaped = simulator.agreements(pairs(factor))
    assert (limited.link, limited.cells) == ("limited", 23)
    assert (unshaped.link, unshaped.cells) == ("unshaped", 11)
    assert limited.largest_error == f"{100 * (factor - 1):+.0f} %"


@pytest.mark.parametrize(("more_bytes", "agree"), [(0.0, 34), (3e3, 34), (100e3, 22), (1e6, 0)])
def test_bytes_agree_within_framing(more_bytes: float, agree: int) -> None:
    assert sum(row.bytes_agree for row in simulator.agreements(pairs(1.0, more_bytes))) == agree


def test_counted_bytes_are_shown_relative_to_those_predicted() -> None:
    """Whatever counts as agreement: adapters alone are 70 kB, of which 35 kB are half."""
    for row in simulator.agreements(pairs(1.0, 35e3)):
        assert row.counted_full.startswith("0.997")
        _, farthest = row.counted_lora.split(", ")
        assert farthest == "0.67"


def test_only_cells_that_were_predicted_are_compared() -> None:
    assert len(simulator.joined("made-up", RECORDS, predicted(1.0)[:5])) == 5


def test_the_figure_says_its_error() -> None:
    drawing = simulator.draw(pairs(1.25))
    assert "limited links: 25 % median absolute error of 23 cells" in drawing.caption
    assert "how far DeepSpeed gathers ahead" in drawing.caption
    (axes,) = drawing.figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == axes.get_ylim()
    points = axes.collections[-1].get_offsets()
    assert len(points) == 34
