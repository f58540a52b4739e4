"""HTML pages and Markdown documents from templates; a page holds everything that it shows.

A figure in it is SVG: text stays text, but for labels with a halo. Dark pages invert it.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from analysis import strategies, text
from analysis.figures.drawings import Drawing
from simulation.quantities import format_link

#: Size at which figures are shown, in CSS pixels per inch.
SCREEN_DPI = 130
#: The least size, at which letters of 7 points have 10 pixels.
READABLE_DPI = 100


#: Values as readers see them.
_FILTERS = {
    "label": strategies.label,
    "link": format_link,
    "number": text.number,
    "percent": text.percent,
    "span": text.one_or_range,
    "times": text.times,
}


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
    environment.filters |= _FILTERS
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


#: Parts that the page has itself: a style of all elements, namespaces, and fonts.
_FOREIGN = re.compile(
    r"""<defs>\s*<style.*?</defs>| xmlns(?::\w+)?="[^"]*"|font-family:[^;"]*;?""", re.DOTALL
)
_REFERENCE = re.compile(r'url\(#([\w.-]+)\)|href="#([\w.-]+)"')


def inline(drawing: Drawing, name: str) -> str:
    """The drawing as an ``svg`` element; ids depend on ``name``, which no other figure may have."""
    content = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": f"{drawing.name} {name}", "svg.fonttype": "none"}):
        drawing.figure.savefig(content, format="svg", metadata=nothing, transparent=True)
    written = re.sub(r"\s*\n\s*", " ", _FOREIGN.sub("", content.getvalue()))
    used = {url or href for url, href in _REFERENCE.findall(written)}
    written = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", written)
    written = re.sub(r"<[^>]+>", _rounded, written)
    box = re.search(r'viewBox="[^"]*"', written)
    assert box is not None
    described = f'role="img" aria-label="{escape(drawing.title)}" class="drawing"'
    return f"<svg {box[0]} {described}>" + written[written.index(">", box.end()) + 1 :]


def _rounded(tag: re.Match[str]) -> str:
    """Coordinates in a tag, to a hundredth of a point; numbers in the figure's text are kept."""
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", tag[0])
