"""``python -m experiments compare``: what two runs, or two cells, differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.records.difference import Pair

_HELP = "A run (a directory or a file of records), or RUN:CELLS."
_LOOK: Mapping[str, Any] = {"header_style": "dim", "padding": (0, 2, 0, 0)}


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
) -> None:
    """Compare two runs cell by cell, or two cells: settings, figures, beyond the spread or not.

    CELLS are settings (`results/ablation:policy=disk,k=1`) or a part of ids; where each side has
    one cell, those two are compared, whatever they differ in. Exit status: 0; 2 if there is
    nothing to compare.
    """
    from experiments.records import difference, found

    try:
        one, other = found.records(a), found.records(b)
        if len(one) == len(other) == 1:
            pairs = [difference.Pair(one[0], other[0])]
        else:
            pairs = difference.pairs(one, other)
        if not pairs:
            raise ValueError(
                f"{a} and {b} have no cell in common: give one cell of each, RUN:CELLS"
            )
    except (ValueError, OSError) as error:
        terminal.stop(error)
    console = terminal.console()
    if len(pairs) == 1:
        console.print(_in_full(pairs[0]))
        return
    console.print(_listed(pairs))
    beyond = sum(pair.beyond_spread for pair in pairs)
    left = max(len(one), len(other)) - len(pairs)
    alone = f"; {left} cells of the larger run have none in the other" if left else ""
    console.print(f"{beyond} of {len(pairs)} cells differ beyond the spread of their steps{alone}")


def _listed(pairs: Sequence[Pair]) -> Table:
    numbers = ("A s/step", "B s/step", "B over A", "A MB/step", "B MB/step")
    table = terminal.table(["cell"], numbers, **_LOOK)
    for pair in pairs:
        seconds, sent = pair.figures["s/step"], pair.figures["MB/step sent"]
        table.add_row(pair.one.cell_id, *map(_number, seconds), _speed(pair), *map(_number, sent))
    return table


def _in_full(pair: Pair) -> Table:
    table = terminal.table(["", "A", "B", "B / A"], **_LOOK)
    table.add_row("cell", pair.one.cell_id, pair.other.cell_id)
    for label, values in pair.settings.items():
        table.add_row(label.lower(), *values)
    table.add_section()
    for name, (mine, theirs) in pair.figures.items():
        if mine is None and theirs is None:
            continue
        if name in ("s/step", "tokens/s"):
            ratio = "none" if not pair.beyond_spread else _ratio(mine, theirs)
        else:
            ratio = _ratio(mine, theirs)
        table.add_row(name, _number(mine), _number(theirs), ratio)
    return table


def _speed(pair: Pair) -> str:
    """How many times as fast B is; none within the spread."""
    if pair.times_as_fast is None:
        return f"{pair.one.state} / {pair.other.state}"
    return f"{pair.times_as_fast:.2f}×" if pair.beyond_spread else "none"


def _ratio(mine: float | None, theirs: float | None) -> str:
    return f"{theirs / mine:.3g}" if mine and theirs is not None else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
