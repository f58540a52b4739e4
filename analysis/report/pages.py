"""HTML pages and Markdown documents from templates; a page holds everything that it shows.

A figure in it is SVG: text stays text, ids are the figure's own, dark pages are served.
"""

from __future__ import annotations

import colorsys
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text

from analysis.figures.drawings import Drawing

#: How large figures are shown, in CSS pixels an inch.
SCREEN_DPI = 130
#: And at the least: letters of 7 points have 10 pixels.
READABLE_DPI = 100


def render(template: str, **values: Any) -> str:
    """The template's text; in an HTML page all values are escaped, those of its parts too."""
    kind = template.removesuffix(".j2").rpartition(".")[2]
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=kind == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(marks=f"marks.{kind}.j2", **values)


class Figures:
    """The figures of one page, numbered so that no two share an id."""

    def __init__(self) -> None:
        self._drawn = 0

    def __call__(self, drawing: Drawing, records: Sequence[str]) -> dict[str, Any]:
        """A drawing as templates take it; ``records`` are its files, relative to the page."""
        self._drawn += 1
        inches = drawing.figure.get_figwidth()
        return {
            "title": drawing.title,
            "caption": drawing.caption,
            "svg": Markup(inline(drawing, f"f{self._drawn}")),
            "records": list(dict.fromkeys(records)),
            # Small figures are not blown up to the page's width, and none is shrunk on a phone
            # until its letters cannot be read: it scrolls.
            "width_px": round(SCREEN_DPI * inches),
            "least_px": round(READABLE_DPI * inches),
        }


#: The page's own colours in place of a figure's neutral ones, so that they follow its scheme.
_NEUTRAL = {
    "#000000": "currentColor",
    "#262626": "currentColor",
    "#333333": "currentColor",
    "#888888": "var(--soft)",
    "#bbbbbb": "var(--line)",
    "#cccccc": "var(--line)",
    "#e6e6e6": "var(--line)",
    "#ffffff": "var(--ground)",
}
#: The ground of dark pages, and what graphics must have against it (WCAG 2.2, 1.4.11).
_DARK_GROUND = "#14171a"
_CONTRAST = 3.0
#: Text with a halo in print: the page draws one behind it, and the text stays text.
_HALO = "halo"
#: Shapes that are drawn again elsewhere keep two digits, places one: a tenth of a point.
_DIGITS = {True: 2, False: 1}
#: Attributes that an ``svg`` of a page has by itself.
_DEFAULTS = {("text-anchor", "start"), ("fill", "#333333"), ("stroke-linejoin", "round")}
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_REFERENCE = re.compile(r"(?<=#)[\w.-]+(?=\))|(?<=^#)[\w.-]+$")


def inline(drawing: Drawing, name: str) -> str:
    """The drawing as an ``svg`` element; its ids start with ``name``, which no other may have."""
    content = io.BytesIO()
    with (
        _for_a_page(drawing.figure),
        mpl.rc_context({"svg.hashsalt": drawing.name, "svg.fonttype": "none"}),
    ):
        drawing.figure.savefig(content, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(content.getvalue())
    _strip(root)
    _rename(root, name)
    for item in root.iter():
        _shorten(item)
    dark = _dark(root)
    root.attrib.pop("version", None)
    root.attrib.pop("height")
    root.attrib.pop("width")
    root.attrib |= {"role": "img", "aria-label": drawing.title, "class": "drawing"}
    if dark:
        root.insert(0, _style(dark))
    return ElementTree.tostring(root, encoding="unicode")


@contextmanager
def _for_a_page(figure: Figure) -> Iterator[None]:
    """Without grounds, which are the page's, and without halos, which would make text outlines."""
    grounds: list[Patch] = [figure.patch, *(ax.patch for ax in figure.axes)]
    halos = [(text, text.get_path_effects()) for text in figure.findobj(Text) if _effects(text)]
    shown = [ground.get_visible() for ground in grounds]
    for ground in grounds:
        ground.set_visible(False)
    for text, _ in halos:
        text.set_path_effects([])
        text.set_gid(_HALO)
    try:
        yield
    finally:
        for ground, visible in zip(grounds, shown, strict=True):
            ground.set_visible(visible)
        for text, effects in halos:
            text.set_path_effects(effects)
            text.set_gid(None)


def _effects(text: object) -> bool:
    return isinstance(text, Text) and bool(text.get_path_effects())


def _strip(root: Element) -> None:
    """Leave out name spaces, metadata, the style of everything, and groups that group nothing."""
    for item in root.iter():
        item.tag = item.tag.rpartition("}")[2]
        for key in list(item.attrib):
            if "}" in key:
                item.set(key.rpartition("}")[2], item.attrib.pop(key))
        item.tail = None
        if item.text is not None and not item.text.strip():
            item.text = None
    for item in list(root.iter()):
        children: list[Element] = []
        for child in item:
            children += _kept(child)
        item[:] = children


def _kept(item: Element) -> list[Element]:
    """The element, or what is left in its place."""
    if item.tag in ("metadata", "style") or (item.tag == "defs" and not len(item)):
        return []
    if item.tag == "defs":
        item[:] = [child for child in item if child.tag != "style"]
        return [item] if len(item) else []
    if item.tag != "g" or item.get("id", "").startswith(_HALO) or set(item.attrib) - {"id"}:
        return [item]
    return [kept for child in item for kept in _kept(child)]


def _rename(root: Element, name: str) -> None:
    """Ids that are referred to, by number; others are left out."""
    used = dict.fromkeys(
        found
        for item in root.iter()
        for value in (item.get("href", ""), item.get("clip-path", ""))
        for found in _REFERENCE.findall(value)
    )
    new = {old: f"{name}-{at}" for at, old in enumerate(used)}
    for item in root.iter():
        old = item.attrib.pop("id", "")
        if old in new:
            item.set("id", new[old])
        elif old.startswith(_HALO):
            item.set("class", _HALO)
        for key in ("href", "clip-path"):
            if key in item.attrib:
                item.set(key, _REFERENCE.sub(lambda match: new[match[0]], item.attrib[key]))


def _shorten(item: Element) -> None:
    """Fewer digits, no spaces that mean nothing, no fonts and turns that are the page's own."""
    digits = _DIGITS["id" in item.attrib]
    for key in ("d", "x", "y", "width", "height", "transform", "points"):
        if key in item.attrib:
            item.set(key, _numbers(item.attrib[key], digits))
    if "d" in item.attrib:
        item.set("d", re.sub(r"\s*([A-Za-z])\s*", r"\1", item.attrib["d"]).strip())
    if item.get("transform", "").startswith(("rotate(-0 ", "rotate(0 ")):
        del item.attrib["transform"]
    if "style" in item.attrib:
        item.set("style", _declarations(item.attrib["style"]))
    if item.get("style") == "":
        del item.attrib["style"]


def _numbers(text: str, digits: int) -> str:
    def short(match: re.Match[str]) -> str:
        written = f"{float(match[0]):.{digits}f}".rstrip("0").rstrip(".")
        return "0" if written == "-0" else written

    return _NUMBER.sub(short, text)


def _declarations(style: str) -> str:
    """A style in which the page's colours stand for neutral ones."""
    kept = []
    for declaration in filter(None, style.split(";")):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font-family" or (name, value) in _DEFAULTS:
            continue
        kept.append(f"{name}:{_COLOUR.sub(_of_the_page, _numbers(value, 2).lower())}")
    return ";".join(kept)


def _of_the_page(match: re.Match[str]) -> str:
    colour = match[0]
    if colour in _NEUTRAL:
        return _NEUTRAL[colour]
    return colour if _reads(colour) else f"var(--c{colour[1:]},{colour})"


def _dark(root: Element) -> dict[str, str]:
    """The dark pages' stand-in for each colour that would not be seen there."""
    styles = " ".join(item.get("style", "") for item in root.iter())
    return {
        colour: _lighter(colour)
        for colour in dict.fromkeys(re.findall(r"var\(--c[0-9a-f]{6},(#[0-9a-f]{6})\)", styles))
    }


def _style(dark: dict[str, str]) -> Element:
    """Every figure says the same of a colour, so that it does no harm that a page has many."""
    colours = ";".join(f"--c{colour[1:]}:{lighter}" for colour, lighter in dark.items())
    style = Element("style")
    style.text = f"@media (prefers-color-scheme:dark){{.drawing{{{colours}}}}}"
    return style


def _lighter(colour: str) -> str:
    """The same hue, as light as it must be on a dark ground."""
    hue, lightness, saturation = colorsys.rgb_to_hls(*_parts(colour))
    while not _reads(colour):
        lightness += 0.02
        parts = colorsys.hls_to_rgb(hue, lightness, saturation)
        colour = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return colour


def _reads(colour: str) -> bool:
    return (_luminance(colour) + 0.05) / (_luminance(_DARK_GROUND) + 0.05) >= _CONTRAST


def _luminance(colour: str) -> float:
    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in _parts(colour)
    )
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _parts(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue
