"""The figure of computation is drawn from the committed record."""

from __future__ import annotations

from pathlib import Path

from docs import draw_compute
from docs.drawn import FIGURES


def test_the_figure_is_the_committed_one(tmp_path: Path) -> None:
    draw_compute.main([str(tmp_path)])
    drawn = (tmp_path / "compute.svg").read_text(encoding="utf-8")
    assert drawn == (FIGURES / "compute.svg").read_text(encoding="utf-8")
