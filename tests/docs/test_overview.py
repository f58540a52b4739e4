"""The README's picture: its bytes are the equations', its files the script's, its texts apart."""

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from matplotlib.transforms import BboxBase

from docs import draw_overview
from docs.draw_overview import PALETTES, Palette
from tests.docs import ROOT

palettes = pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)


def test_bytes_are_those_of_two_nodes_by_hand() -> None:
    """P = 20 GB, of which each of two nodes sends and holds a half."""
    amounts = draw_overview.quantities()
    assert amounts.crossing == pytest.approx(10e9)
    assert amounts.host == pytest.approx(10e9, rel=1e-3)  # pages
    assert amounts.inside == pytest.approx(20e9)
    assert amounts.sent == (pytest.approx((30e9, 20e9)), pytest.approx((20.3e9, 0.2e9)))


def inside(box: BboxBase, whole: BboxBase) -> bool:
    return all(whole.contains(x, y) for x, y in box.corners())


@palettes
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


def luminance(colour: str) -> float:
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@palettes
def test_texts_stand_out_from_all_that_they_are_drawn_on(palette: Palette) -> None:
    """WCAG's contrast for text: at least 4.5."""
    for ink in ("text", "quiet", "gather", "reduce", "inside", "host"):
        for ground in ("background", "box", "link"):
            light, dark = sorted(
                (luminance(getattr(palette, name)) for name in (ink, ground)), reverse=True
            )
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)


def test_the_readme_shows_all_of_them() -> None:
    """On a phone the halves are stacked, so that letters have 10 pixels there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in draw_overview.figures():
        assert f'"docs/figures/{name}.svg"' in readme
    width = draw_overview.draw(PALETTES[0], columns=1).get_figwidth()
    assert draw_overview.FONT / 72 * 350 / width >= 10
