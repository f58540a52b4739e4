"""Checks that every HTML page of this repository passes."""

import re
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Collects everything that a browser would fetch, and checks that tags are balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag != "a":  # which fetches nothing until it is followed
            self.sources += [
                value for name, value in attrs if name == "href" and value and value[0] != "#"
            ]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(page: str, pictures: int) -> None:
    """The page is whole, has so many pictures of its own and one script, and loads nothing."""
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.sources == []
    assert reader.tags.count("svg") == pictures
    assert sorted(set(reader.ids)) == sorted(reader.ids)
    used = re.findall(r"url\(#(.*?)\)|<use [^>]*href=\"#(.*?)\"", page)
    assert {name for pair in used for name in pair if name} <= set(reader.ids)
    assert reader.tags.count("script") == 1
    assert not {"link", "iframe", "object"} & set(reader.tags)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
