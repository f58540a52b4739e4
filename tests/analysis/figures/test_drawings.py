"""What figures have around their axes; the figure of slots draws what the records say."""

import warnings
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.drawings import Drawing, canvas, put_legend
from analysis.load.table import COLUMNS, frame
from experiments.records.record import Record
from tests.analysis import made_up


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


def finished(strategy: str, **told: Any) -> Record:
    return made_up.record(made_up.cell(strategy), **told)


def slots_of(records: list[Record]) -> list[Drawing]:
    drawn = matrix.draw(compare(records))
    return [drawing for drawing in drawn if drawing.name.endswith("slots")]


def test_bytes_and_activations_are_the_records() -> None:
    ring = finished("cyclic-ring", bytes_by_slot=[1e6, 2e6])
    kept = finished(
        "cyclic-interleaved", activation_bytes_by_slot=[3e6, 3e6], activation_bytes_together=4e6
    )
    ddp = finished("ddp", inter_node_bytes_per_step=5e6)
    (drawing,) = slots_of([ddp, ring, kept])
    sent, activations = drawing.figure.axes
    values: list[list[list[float]]] = [
        [[*map(float, line.get_ydata())] for line in ax.lines]  # type: ignore[arg-type, union-attr]
        for ax in (sent, activations)
    ]
    assert values == [[[1, 2], [5, 5]], [[3, 3], [4, 4]]]
    labels = [str(text.get_text()) for text in drawing.figure.legends[0].get_texts()]
    assert labels == ["cyclic-ring", "cyclic-interleaved", "all at once"]
    assert slots_of([finished("ddp"), finished("cyclic")]) == []


@pytest.mark.parametrize("column", ["bytes_by_slot", "activation_bytes_by_slot"])
def test_lists_stay_lists(column: str) -> None:
    assert COLUMNS[column] == "object"
    (row,) = frame([finished("cyclic-ring", **{column: [1.0, 2.0]})])[column]
    assert row == [1.0, 2.0]
    assert pd.isna(frame([finished("ddp")])[column][0])
