"""The documentation's site: built without a warning, and every link in it leads somewhere."""

import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import fcdp
from tests import programs
from tests.docs import DOCS, ROOT

pytest.importorskip("mkdocs", reason="no mkdocs here: make setup installs it (group docs)")
pytest.importorskip("mkdocstrings_handlers.python", reason="no mkdocstrings here: make setup")

#: Pages of the theme that only a server shows.
_NOT_PAGES = {"404.html"}


class Reader(HTMLParser):
    """Links of a page, files that it fetches, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.ids |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag in ("img", "script", "link"):
            self.fetched += [attributes[name] for name in ("src", "href") if name in attributes]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as ``make docs`` builds it, or has just built it."""
    if built := os.environ.get("FCDP_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    words = ("-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    variables = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path}
    done = programs.ended(sys.executable, *words, within_s=300, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    readers = {}
    for file in site.rglob("*.html"):
        if file.name not in _NOT_PAGES:
            readers[file] = Reader()
            readers[file].feed(file.read_text(encoding="utf-8"))
    return readers


def test_each_page_of_docs_is_a_page_of_the_site_and_scripts_are_not(site: Path) -> None:
    names = {page.stem for page in DOCS.glob("*.md")} - {"README"} | {"index", "library"}
    assert {page.stem for page in site.glob("*.html")} - {"404"} == names
    scripts = set(site.rglob("*.py")) | set(site.rglob("__pycache__"))
    assert scripts == set()


def test_the_reference_has_every_public_name(site: Path, pages: dict[Path, Reader]) -> None:
    ids = pages[site / "library.html"].ids
    named = {name.rpartition(".")[2] for name in ids if name.startswith("fcdp.")}
    assert set(fcdp.__all__) <= named
    text = (site / "library.html").read_text(encoding="utf-8")
    assert not any(role in text for role in (":func:", ":class:", ":meth:"))


def test_the_five_pages_come_first_and_are_searched(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    five = ("index", "repository/REPRODUCTION", "use", "extend", "reference")
    first = re.findall(r'<a href="([^"#]+)\.html" class="md-nav__link', front)[:5]
    assert [name.removeprefix("./") for name in first] == [*five]
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    assert all(f'"location":"{name}.html"' in index for name in five)


def test_every_link_inside_leads_to_a_page_and_its_heading(pages: dict[Path, Reader]) -> None:
    wrong = [problem for page in pages for problem in _problems(page, pages)]
    assert wrong == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def _problems(page: Path, pages: dict[Path, Reader]) -> Iterator[str]:
    for link in pages[page].links + pages[page].fetched:
        target = urlsplit(link)
        if target.scheme or target.netloc:
            continue
        file = (page.parent / unquote(target.path)).resolve() if target.path else page
        if not file.is_file():
            yield f"{page.name}: {link}: no such file"
        elif target.fragment and file in pages and unquote(target.fragment) not in pages[file].ids:
            yield f"{page.name}: {link}: no such heading"


def test_nothing_is_fetched_from_elsewhere(pages: dict[Path, Reader]) -> None:
    fetched = {source for page in pages.values() for source in page.fetched}
    assert [source for source in fetched if urlsplit(source).netloc] == []
