"""Surroundings of the axes of figures."""

import warnings

import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures.drawings import canvas, put_legend


def drawn(count: int, label: str) -> Figure:
    """A small figure whose legend has so many lines."""
    with canvas(2.0, 2.0) as (figure, _):
        put_legend(figure, [Line2D([], [], label=f"{label} {number}") for number in range(count)])
    return figure


@pytest.mark.parametrize("count", [1, 4, 12, 24])
def test_a_legend_fits_and_leaves_axes_their_height(count: int) -> None:
    # Warnings are of a layout that was not applied.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = drawn(count, "fuyou 44 MiB of DRAM overlapped swap none SSD 15 MB/s")
        figure.draw_without_rendering()
    legend, (axes,) = figure.legends[0].get_window_extent(), figure.axes
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.width
    assert legend.y0 >= axes.get_window_extent().y1
    assert axes.get_window_extent().height > 0.5 * figure.dpi
    # A short one leaves the figure as it was.
    assert tuple(drawn(2, "fcdp").get_size_inches()) == (2.0, 2.0)
