"""Tables of text, such as those of a matrix's cells, written as Markdown, CSV and LaTeX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis import strategies, text
from analysis.compare.baseline import compare, seeds_in_words
from analysis.load.rows import Quantity, Row
from analysis.load.runs import Run
from analysis.paper.contents import Pivot, Seeds
from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.record import METRICS

#: Signs that LaTeX reads as commands, and signs that its fonts lack.
_LATEX = str.maketrans(
    {
        **{sign: rf"\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "×": r"$\times$",
        "τ": r"$\tau$",
        "–": "--",
        "−": "$-$",
        "³": "$^3$",
        "²": "$^2$",
        "✓": r"$\surd$",
        "±": r"$\pm$",
        "β": r"$\beta$",
    }
)


@dataclass(frozen=True)
class Table:
    """Text under named columns; the first column is words, the others are flush right."""

    #: The stem of its files' names.
    name: str
    title: str
    frame: pd.DataFrame


def as_csv(table: Table) -> str:
    """The table as comma-separated values."""
    return table.frame.to_csv(index=False, lineterminator="\n")


def as_latex(table: Table) -> str:
    """The table as a ``tabular`` that needs the package booktabs."""
    cells = table.frame.rename(columns=_as_latex).map(_as_latex)
    places = "l" + "r" * (len(cells.columns) - 1)
    return f"% {table.title}\n" + cells.to_latex(index=False, escape=False, column_format=places)


def _as_latex(value: str) -> str:
    return value.translate(_LATEX)


def write(tables: Sequence[Table], directory: Path) -> None:
    """Write each table as CSV and LaTeX."""
    directory.mkdir(parents=True, exist_ok=True)
    for table in tables:
        (directory / f"{table.name}.csv").write_text(as_csv(table), encoding="utf-8")
        (directory / f"{table.name}.tex").write_text(as_latex(table), encoding="utf-8")


#: The format of each quantity.
_WRITTEN: dict[Quantity, Callable[[float], str]] = {
    "tokens_per_s": text.number,
    "peak_device_bytes": lambda value: f"{value / 1e9:.1f}",
    **{name: metric.written for name, metric in METRICS.items()},
}


def pivoted(pivot: Pivot, rows: Sequence[Row]) -> Table:
    """The pivot of these cells: a value, the state of a cell without one, or a dash."""
    chosen = [row for row in rows if pivot.of is None or pivot.of.matches(row)]
    cells = {
        (str(row.settings[pivot.rows]), str(row.settings[pivot.columns])): _cell(pivot, row)
        for row in chosen
    }
    sides = list(dict.fromkeys(side for side, _ in cells))
    if pivot.rows == "strategy":
        sides = strategies.ordered(sides)
    tops = list(dict.fromkeys(top for _, top in cells))
    if all(top.isdigit() for top in tops):
        tops.sort(key=int)
    lines = [
        (_word(pivot.rows, side), *(cells.get((side, top), text.ABSENT) for top in tops))
        for side in sides
    ]
    heads = [_label(pivot.rows), *(_head(pivot.columns, top) for top in tops)]
    return Table(pivot.id, pivot.title, pd.DataFrame(lines, columns=heads))


def over_seeds(seeds: Seeds, run: Run) -> Table:
    """Mean ± standard deviation of held-out metrics, and of differences seed by seed."""
    return Table(seeds.id, seeds.title, seeds_in_words(compare(run.records, seeds.over)))


def _cell(pivot: Pivot, row: Row) -> str:
    value = row.quantities.get(pivot.quantity)
    return row.state if value is None else _WRITTEN[pivot.quantity](value)


def _word(setting: str, value: str) -> str:
    return strategies.label(value) if setting == "strategy" else value


def _head(setting: str, value: str) -> str:
    """A column's name; a plain number is labelled with its setting."""
    if not value.isdigit():
        return _word(setting, value)
    written = settings.described(Cell)[setting].written(int(value))
    return f"{_label(setting)} {value}" if written == value else written


def _label(setting: str) -> str:
    return "System" if setting == "strategy" else settings.described(Cell)[setting].setting.label
