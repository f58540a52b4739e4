"""The README's picture: its bytes are the equations', its files the script's, its texts apart."""

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

from docs import draw_overview
from docs.draw_overview import PALETTES, Palette
from tests.docs import ROOT


def test_bytes_are_those_of_two_nodes_by_hand() -> None:
    """P = 20 GB, of which each of two nodes sends and holds a half."""
    amounts = draw_overview.quantities()
    assert amounts.crossing == pytest.approx(10e9)
    assert amounts.host == pytest.approx(10e9, rel=1e-3)  # pages
    assert amounts.inside == pytest.approx(20e9)
    assert amounts.sent == (pytest.approx((30e9, 20e9)), pytest.approx((20.3e9, 0.2e9)))


def inside(box: BboxBase, whole: BboxBase) -> bool:
    return all(whole.contains(x, y) for x, y in box.corners())


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
@pytest.mark.parametrize("columns", [1, 2])
def test_no_text_lies_on_another_or_leaves_the_figure(palette: Palette, columns: int) -> None:
    figure = draw_overview.draw(palette, columns)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts]
    assert len(boxes) > 20
    assert [a for a, b in combinations(boxes, 2) if a.overlaps(b)] == []
    assert [box for box in boxes if not inside(box, figure.bbox)] == []


def test_the_readme_shows_all_of_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in draw_overview.figures():
        assert f'"docs/figures/{name}.svg"' in readme
