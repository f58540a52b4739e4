"""Figures inside a page: text is text, ids are their own, nothing reaches the rest of it."""

import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from analysis.figures import drawings
from analysis.figures.drawings import Drawing
from analysis.report.pages import inline


@pytest.fixture
def drawing() -> Drawing:
    figure = Figure(figsize=(4, 3))
    ax = figure.subplots()
    ax.plot([1, 2, 3], [1, 3, 2], marker="o", color="#003F6B", label="a & b")
    ax.plot([1, 2], [2, 1], color="#D55E00")
    ax.set_title("50 % of <all>, 0.12345")
    ax.annotate("10×", (2, 3), path_effects=[withStroke(linewidth=2.5, foreground="white")])
    return Drawing("made-up", "Made up", "A caption.", figure)


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.replace("xlink:", ""))  # as HTML reads it


def test_text_is_text_and_the_drawing_stays_as_it_was(drawing: Drawing) -> None:
    before = drawings.svg(drawing)
    written = inline(drawing, "f1")
    texts = ["".join(item.itertext()) for item in parsed(written).iter("text")]
    assert "50 % of <all>, 0.12345" in texts
    assert drawings.svg(drawing) == before
    # It has no style or ground of its own, and is less than half the file.
    assert "<style" not in written
    assert "fill: #ffffff" not in written
    assert len(written) < len(before) / 2


def test_two_figures_of_one_page_share_no_id_and_refer_to_their_own(drawing: Drawing) -> None:
    taken: set[str] = set()
    for root in (parsed(inline(drawing, name)) for name in ("f1", "f2")):
        ids = {item.attrib["id"] for item in root.iter() if "id" in item.attrib}
        written = " ".join(
            value for item in root.iter() for key, value in item.attrib.items() if key != "id"
        )
        used = set(re.findall(r"url\(#([\w-]+)\)", written)) | {
            item.attrib["href"][1:] for item in root.iter("use")
        }
        assert ids == used
        assert len(ids) >= 2  # a clip and a marker
        assert not taken & ids
        taken |= ids
