"""Figures inside a page: text is text, ids are their own, colours are the page's."""

from __future__ import annotations

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
    ax.set_title("50 % of <all>")
    ax.annotate("10×", (2, 3), path_effects=[withStroke(linewidth=2.5, foreground="white")])
    return Drawing("made-up", "Made up", "A caption.", figure)


def texts(svg: str) -> list[str]:
    return ["".join(item.itertext()) for item in ElementTree.fromstring(svg).iter("text")]


def test_text_is_text_even_with_a_halo_and_the_drawing_stays_as_it_was(drawing: Drawing) -> None:
    before = drawings.svg(drawing)
    svg = inline(drawing, "f1")
    assert {"50 % of <all>", "10×"} <= set(texts(svg))
    assert svg.count('class="halo"') == 1
    assert drawings.svg(drawing) == before


def test_two_figures_of_one_page_share_no_id_and_refer_to_their_own(drawing: Drawing) -> None:
    one, other = (ElementTree.fromstring(inline(drawing, name)) for name in ("f1", "f2"))
    for root, name in ((one, "f1-"), (other, "f2-")):
        ids = {item.attrib["id"] for item in root.iter() if "id" in item.attrib}
        written = " ".join(
            value for item in root.iter() for key, value in item.attrib.items() if key != "id"
        )
        used = set(re.findall(r"url\(#([\w-]+)\)", written)) | {
            item.attrib["href"][1:] for item in root.iter("use")
        }
        assert ids == used
        assert all(found.startswith(name) for found in ids)
        assert len(ids) >= 2  # a clip and a marker


def test_a_style_of_one_figure_does_not_reach_the_page(drawing: Drawing) -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", inline(drawing, "f1"))
    assert re.fullmatch(r"@media \(prefers-color-scheme:dark\)\{\.drawing\{--c[^{}]*\}\}", style)


def test_colours_follow_the_page_and_dark_ones_have_a_lighter_one(drawing: Drawing) -> None:
    svg = inline(drawing, "f1")
    assert "var(--c003f6b,#003f6b)" in svg
    (lighter,) = re.findall(r"--c003f6b:(#[0-9a-f]{6})", svg)
    assert sum(int(lighter[at : at + 2], 16) for at in (1, 3, 5)) > 0x3F + 0x6B
    assert "--cd55e00" not in svg  # which is seen on both grounds
    assert "#000000" not in svg
    assert "#ffffff" not in svg


def test_it_is_a_third_of_the_file_at_most(drawing: Drawing) -> None:
    assert len(inline(drawing, "f1")) < len(drawings.svg(drawing)) / 3
