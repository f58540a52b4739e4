"""The map of strategies is drawn from its committed cells, which the planner still gives."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from docs import draw_bound, draw_map
from docs.drawn import FIGURES

CELLS = json.loads(draw_map.DATA.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["map", "scale"])
def test_the_figures_are_the_committed_ones(name: str, tmp_path: Path) -> None:
    draw_map.main(["--drawn", str(tmp_path)])
    drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == (FIGURES / f"{name}.svg").read_text(encoding="utf-8")


def test_cells_are_what_the_planner_says(request: pytest.FixtureRequest) -> None:
    whole = request.config.getoption("--exhaustive")
    for one in CELLS if whole else random.Random(9).sample(CELLS, 4):
        settings = {key: one[key] for key in ("model", "gpu", "nodes", "gbit_s", "tuning")}
        found = draw_map.cell(**settings)
        assert found["take"] == one["take"]
        assert found["tokens_per_s"] == pytest.approx(one["tokens_per_s"], rel=1e-3)


def test_the_bound_s_figure_is_the_committed_one(tmp_path: Path) -> None:
    draw_bound.main([str(tmp_path)])
    drawn = (tmp_path / "bound.svg").read_text(encoding="utf-8")
    assert drawn == (FIGURES / "bound.svg").read_text(encoding="utf-8")


def test_the_closed_form_is_more_hopeful_than_the_simulator() -> None:
    """1.3B: 382 thousand tokens by the closed form, a seventh of it by the simulator."""
    _, layers, width, gpus = draw_bound.bound.MODELS[0]
    shape = draw_bound.Shape(layers=layers, width=width)
    closed = draw_bound.token_capacity(shape, draw_bound.of_class("a100-40gb", 100, gpus))
    simulated = draw_bound.tokens_that_fit(layers, width, gpus, vocabulary=50_257)
    assert closed == pytest.approx(382e3, rel=0.01)
    assert 0.1 < simulated / closed < 0.2
