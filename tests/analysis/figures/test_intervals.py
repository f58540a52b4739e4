"""Held-out loss over the interval: the points are the records', and only such matrices have it."""

from statistics import median
from typing import Any

import pytest
from matplotlib.axes import Axes

from analysis import strategies
from analysis.compare.baseline import compare
from analysis.figures import matrix
from analysis.load.table import frame
from experiments.records.record import Record
from tests.analysis import made_up

SEEDS, INTERVALS = (0, 1, 2), (3, 12, 48)


def record(strategy: str, seed: int, interval: int, loss: float, **settings: Any) -> Record:
    own = {"interval": interval, **settings} if strategy == "co2" else {}
    of = made_up.cell(strategy, link=10**8, seed=seed, **own)
    return made_up.record(of, held_out_loss=loss, steps_per_round=interval)


def loss_of(interval: int, seed: int) -> float:
    return 3 + interval / 100 + seed / 10


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [
        *(record("fsdp2", seed, 1, 2.5 + seed / 10) for seed in SEEDS),
        *(record("co2", seed, tau, loss_of(tau, seed)) for seed in SEEDS for tau in INTERVALS),
        *(
            record("co2", seed, tau, loss_of(tau, seed) - 1, penalty="none")
            for seed in SEEDS
            for tau in INTERVALS
        ),
    ]


def lines(ax: Axes, strategy: str, among: list[str]) -> list[Any]:
    colour = strategies.styles(among)[strategy].colour
    return [drawn for drawn in ax.lines if drawn.get_color() == colour]


def test_points_are_the_records_and_lines_their_medians(records: list[Record]) -> None:
    found = [drawn for drawn in matrix.draw(compare(records)) if drawn.name.endswith("intervals")]
    assert len(found) == 1
    (ax,) = found[0].figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["3", "12", "48"]
    among = ["fsdp2", "co2", "co2 penalty none"]
    for name, less in (("co2", 0), ("co2 penalty none", 1)):
        joined, points = lines(ax, name, among)
        medians = [median(loss_of(tau, seed) for seed in SEEDS) - less for tau in INTERVALS]
        assert list(joined.get_xdata()) == list(INTERVALS)
        assert list(joined.get_ydata()) == pytest.approx(medians)
        assert sorted(points.get_ydata()) == pytest.approx(
            sorted(loss_of(tau, seed) - less for tau in INTERVALS for seed in SEEDS)
        )
    (level,) = lines(ax, "fsdp2", among)
    assert list(level.get_ydata()) == pytest.approx([2.6, 2.6])
    assert "A point per seed, of 3" in found[0].caption


def test_one_interval_is_no_curve(records: list[Record]) -> None:
    alike = [item for item in records if item.measurement and item.measurement.steps_per_round < 4]
    assert not matrix.has_intervals(frame(alike))
