"""Checks that every HTML page of this repository passes."""

import re
from html.parser import HTMLParser


class Balanced(HTMLParser):
    """Checks that each tag is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An empty tag leaves none open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str, pictures: int) -> None:
    """The page is whole, has so many pictures of its own and one script, and loads nothing."""
    reader = Balanced()
    reader.feed(page)
    assert reader.open == []
    # A browser fetches the addresses of links when they are followed, and all others at once.
    assert re.findall(r'<(?!a\s)[^>]*\s(?:src|srcset|href)="(?!#)', page) == []
    ids = re.findall(r'\sid="(.*?)"', page)
    assert sorted(set(ids)) == sorted(ids)
    used = re.findall(r"url\(#(.*?)\)|<use [^>]*href=\"#(.*?)\"", page)
    assert {name for pair in used for name in pair if name} <= set(ids)
    assert (page.count("<svg "), page.count("<script")) == (pictures, 1)
    assert not re.search(r"<(?:link|iframe|object)\b", page)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
