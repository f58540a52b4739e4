"""HTML pages and Markdown documents from templates; a page holds everything that it shows."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from analysis.figures import drawings

#: How large figures are shown, in CSS pixels an inch.
SCREEN_DPI = 130


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


def figure(drawing: drawings.Drawing) -> dict[str, Any]:
    """A drawing as the page's template takes it."""
    # Half of base64's size once a page is compressed, as it is text and stays so.
    picture = quote(drawings.svg(drawing), safe=" /:=;,()'+")
    return {
        "title": drawing.title,
        "caption": drawing.caption,
        "source": f"data:image/svg+xml,{picture}",
        # Small figures are not blown up to the page's width.
        "width_px": round(SCREEN_DPI * drawing.figure.get_figwidth()),
    }
