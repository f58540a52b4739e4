"""A table of text, and how it is written: Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: What LaTeX reads as commands, and signs that its fonts lack.
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "×": r"$\times$", "τ": r"$\tau$", "–": "--", "−": "$-$", "³": "$^3$", "²": "$^2$",
    "✓": r"$\surd$", "±": r"$\pm$", "β": r"$\beta$",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns; the first column is words, the others are set right."""

    #: The stem of its files' names.
    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def as_markdown(table: Table) -> str:
    """The table with escaped bars."""
    rule = ["---", *["--:"] * (len(table.columns) - 1)]
    rows = [[_cell(value) for value in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [table.columns, rule, *rows])


def as_csv(table: Table) -> str:
    """The same as comma-separated values."""
    content = io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([table.columns, *table.rows])
    return content.getvalue()


def as_latex(table: Table) -> str:
    """The same as a ``tabular`` that needs the package booktabs."""
    places = "l" + "r" * (len(table.columns) - 1)
    head, *body = (" & ".join(map(_latex, row)) + r" \\" for row in [table.columns, *table.rows])
    lines = [rf"\begin{{tabular}}{{{places}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([f"% {table.title}", *lines, r"\bottomrule", r"\end{tabular}", ""])


def write(tables: Sequence[Table], directory: Path) -> None:
    """Each table as CSV and LaTeX."""
    directory.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (directory / f"{table.name}.csv").write_text(as_csv(table), encoding="utf-8")
        (directory / f"{table.name}.tex").write_text(as_latex(table), encoding="utf-8")


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")


def _latex(value: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in value)
