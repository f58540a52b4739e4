"""The figures of Fuyou's page are those of its records and of the model."""

from __future__ import annotations

from pathlib import Path

from docs import draw_fuyou
from docs.drawn import FIGURES


def test_the_figures_are_those_of_the_records(tmp_path: Path) -> None:
    draw_fuyou.main([str(tmp_path)])
    for name in ("fuyou-published.svg", "fuyou-measured.svg"):
        assert (tmp_path / name).read_text() == (FIGURES / name).read_text(), name


def test_the_chosen_amount_is_within_a_twentieth_of_the_best_that_was_measured() -> None:
    """By the cell that was given that amount: two of the same amount differ by more than that."""
    given, chosen = {}, None
    for record in draw_fuyou.records("fuyou-swap"):
        assert record.step_seconds_median is not None
        if draw_fuyou.swap(record) == "auto":
            chosen = draw_fuyou.chosen(record)
        else:
            given[draw_fuyou.chosen(record)] = record.step_seconds_median
    assert chosen in given
    assert given[chosen] <= 1.05 * min(given.values())
