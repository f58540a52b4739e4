"""The documentation agrees with the code."""

import re

from tests.programs import ROOT

DOCS = ROOT / "docs"


def table(page: str, name: str) -> list[dict[str, str]]:
    """Rows of the Markdown table that follows ``<!-- name -->`` in a page, by column."""
    text = (DOCS / page).read_text(encoding="utf-8")
    _, _, after = text.partition(f"<!-- {name} -->\n")
    lines = after.strip().split("\n\n")[0].splitlines()
    head, _, *rows = (
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))] for line in lines
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def block(page: str, name: str) -> str:
    """The fenced block that follows ``<!-- name -->`` in a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (body,) = re.findall(rf"<!-- {name} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    return str(body)
