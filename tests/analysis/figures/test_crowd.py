"""Many strategies: an engine a column, nothing on top of anything else, values of the records."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import strategies
from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.figures.drawings import Drawing
from experiments.records.record import Record
from tests.analysis import made_up

GPT2, _ = made_up.MODELS
#: The records, and the drawings by what they show.
Drawn = tuple[list[Record], dict[str, Drawing]]
ENGINES = {
    "DeepSpeed": [f"deepspeed-{name}" for name in ("zero3", "hpz", "hpz-offload", "offload")],
    "PyTorch": ["fsdp2", "fsdp2-hsdp", "fsdp2-reshard", "fsdp2-offload", "ddp"],
    "This engine": ["zero3", "hpz", "qwz", "qgz", "zeropp", "another", "fcdp"],
}
NAMES = [name for names in ENGINES.values() for name in names]


def made(link: int | None, tuning: str, at: int) -> Record:
    """A cell of one strategy, each a little slower than the one before."""
    base = made_up.record(made_up.cell("fsdp2", GPT2, tuning, link))
    assert base.measurement is not None
    seconds = [second * (1 + at / 10) for second in base.measurement.step_seconds]
    sent = base.measurement.inter_node_bytes_per_step * (1 + at)
    cell = base.cell.model_copy(update={"strategy": NAMES[at]})
    measured = base.measurement.model_copy(
        update={"step_seconds": seconds, "inter_node_bytes_per_step": sent}
    )
    return base.model_copy(update={"cell": cell, "cell_id": cell.id, "measurement": measured})


def drawn(*links: int | None) -> Drawn:
    records = [
        made(link, tuning, at)
        for link in links
        for tuning in ("full", "lora")
        for at in range(len(NAMES))
    ]
    drawings = matrix.draw(compare(records))
    return records, {item.name.rpartition("-")[2]: item for item in drawings}


@pytest.fixture(scope="module")
def many() -> Drawn:
    return drawn(*made_up.LINKS)


@pytest.fixture(scope="module")
def bars() -> Drawn:
    return drawn(None)


def shown(figure: Figure) -> Any:
    """The renderer, after the figure was laid out."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def names_of(ax: Axes) -> list[Text]:
    return [label for label in ax.get_yticklabels() if label.get_text()]


def test_a_column_has_its_engine_and_what_all_are_compared_with(
    many: Drawn,
) -> None:
    records, drawings = many
    looks = strategies.styles(NAMES)
    axes = drawings["throughput"].figure.axes
    assert len(axes) == 2 * len(ENGINES)

    for engine, ax in zip(ENGINES, axes, strict=False):
        assert ax.get_title() == f"{engine}\ngpt2-4x128, full fine-tuning"
        expected = {
            (to_hex(looks[record.cell.strategy].colour), round(record.tokens_per_s or 0, 6))
            for record in records
            if record.cell.tuning == "full"
            and record.cell.strategy in {*ENGINES[engine], "deepspeed-zero3", "fcdp"}
        }
        lines: list[Any] = [line for line in ax.lines if line.get_transform() == ax.transData]
        found = {
            (to_hex(line.get_color()), round(float(y), 6))
            for line in lines
            for y in line.get_ydata()
        }
        assert found == expected


def test_the_legend_has_a_column_an_engine(
    many: Drawn,
) -> None:
    (legend,) = many[1]["throughput"].figure.legends
    labels = [label.get_text().strip() for label in legend.get_texts()]
    rows = len(labels) // len(ENGINES)

    for at, (engine, names) in enumerate(ENGINES.items()):
        column = [label for label in labels[at * rows : (at + 1) * rows] if label]
        heading = engine.replace(" ", r"\ ")
        assert column == [rf"$\bf{{{heading}}}$", *map(strategies.label, strategies.ordered(names))]


@pytest.mark.parametrize("what", ["throughput", "traffic"])
def test_names_of_bars_do_not_touch_and_lie_inside_the_picture(what: str, bars: Drawn) -> None:
    figure = bars[1][what].figure
    renderer = shown(figure)
    labels = names_of(figure.axes[0])
    boxes = [label.get_window_extent(renderer) for label in labels]

    assert [label.get_text() for label in labels] == [
        strategies.label(name) for name in strategies.ordered(NAMES)
    ]
    assert all(not a.overlaps(b) for a, b in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0


@pytest.mark.parametrize("what", ["throughput", "losses"])
def test_the_legend_lies_inside_the_picture_and_above_the_axes(what: str, many: Drawn) -> None:
    figure = many[1][what].figure
    renderer = shown(figure)
    (legend,) = figure.legends
    box = legend.get_window_extent(renderer)

    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert all(ax.get_window_extent(renderer).y1 <= box.y0 for ax in figure.axes)


def test_up_to_six_strategies_share_one_pair_of_axes() -> None:
    records = [made(None, "full", at) for at in range(matrix.CROWD)]

    drawings = matrix.draw(compare(records))

    assert [item.name.rpartition("-")[2] for item in drawings] == ["traffic", "losses"]
