"""What was measured is written by a command: prose has no such number of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
#: Speed-ups, bytes of a step, speeds; not dimensions, such as 2 × 2.
MEASURED = re.compile(r"(\d[\d.,]*)(?:×(?! ?\d)| (?:tokens/s|MB (?:per|a) step|s/step))")
BLOCK = re.compile(r"<!-- (\S+?)(?:: [^>]*)? -->.*?(?:<!-- end of \1 -->|\Z|(?=\n#))", re.DOTALL)


def blocks(page: Path) -> str:
    """What a command writes of a page, or a test compares with what it is of."""
    return "\n".join(match[0] for match in BLOCK.finditer(page.read_text("utf-8")))


def prose(page: Path) -> str:
    """The rest, without code."""
    return re.sub(r"```.*?```", "", BLOCK.sub("", page.read_text("utf-8")), flags=re.DOTALL)


def test_no_measured_number_stands_in_prose_alone() -> None:
    made = [
        ROOT / "REPRODUCTION.md",
        ROOT / "results/tables.md",
        *(ROOT / "results/paper").glob("*.md"),
    ]
    written = "\n".join([*map(blocks, PAGES), *(page.read_text("utf-8") for page in made)])
    known = set(re.findall(r"\d[\d.,]*", written))

    for page in PAGES:
        alone = [number for number in MEASURED.findall(prose(page)) if number not in known]
        assert alone == [], page.name


def test_prose_and_blocks_are_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is 3.5× as fast.\n<!-- a: written by b -->\n7×\n<!-- end of a -->\n2 × 2\n")

    assert MEASURED.findall(prose(page)) == ["3.5"]
    assert MEASURED.findall(blocks(page)) == ["7"]
