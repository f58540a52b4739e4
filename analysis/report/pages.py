"""HTML pages and Markdown documents from templates; a page holds everything that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from analysis.figures.drawings import Drawing
from analysis.figures.inline import inline

#: How large figures are shown, in CSS pixels an inch.
SCREEN_DPI = 130
#: And at the least: letters of 7 points have 10 pixels.
READABLE_DPI = 100


def render(template: str, **values: Any) -> str:
    """The template's text; in an HTML page all values are escaped."""
    environment = Environment(
        loader=PackageLoader("analysis.report"),
        autoescape=select_autoescape(["html", "html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


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
