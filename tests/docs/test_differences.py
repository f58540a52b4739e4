"""The figure of differences, and what else rests on its record."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import draw_differences
from docs.drawn import FIGURES
from simulation.step.exchanges import MEASURED

#: Bits per parameter that a gather may take, of 16, at three learning rates of fine-tuning.
MOST = {3e-5: 16 / 6, 1e-5: 16 / 8, 1e-6: 16 / 25}


def test_the_figure_is_that_of_the_records(tmp_path: Path) -> None:
    draw_differences.main([str(tmp_path)])
    committed = FIGURES / "differences.svg"
    assert (tmp_path / "differences.svg").read_text() == committed.read_text()


def test_the_simulator_assumes_what_was_measured() -> None:
    assert dict(MEASURED) == pytest.approx(draw_differences.bits(), rel=0.03)


def test_gathers_take_few_bits_at_the_rates_of_fine_tuning() -> None:
    told = draw_differences.bits()
    assert all(told[rate] <= most for rate, most in MOST.items())
