"""The figure of predictions against what was timed."""

from __future__ import annotations

from analysis.figures import predictions
from tests.analysis.compare.test_predictions import pairs


def test_the_figure_says_its_error() -> None:
    drawing = predictions.draw(pairs(1.25))
    assert "limited links: 25 % median absolute error of 23 cells" in drawing.caption
    assert "how far DeepSpeed gathers ahead" in drawing.caption
    (axes,) = drawing.figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert axes.get_xlim() == axes.get_ylim()
    points = axes.collections[-1].get_offsets()
    assert len(points) == 34
