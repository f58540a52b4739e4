"""What every HTML page of this repository must be."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Collects everything that a browser would fetch, and checks that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset")]
        self.sources += [
            value for name, value in attrs if name == "href" and value and value[0] != "#"
        ]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str, pictures: int) -> None:
    """The page is whole, has so many pictures and one script, and loads nothing."""
    reader = Reader()
    reader.feed(page)

    assert reader.open == []
    assert len(reader.sources) == pictures
    assert all(source.startswith("data:image/svg+xml,") for source in reader.sources)
    assert reader.tags.count("script") == 1
    assert not {"link", "iframe", "object"} & set(reader.tags)
    # In pictures the addresses of namespaces are quoted.
    assert not re.search(r"https?://|@import|url\(", re.sub(r'src="data:[^"]*"', "", page))
