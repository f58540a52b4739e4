"""``python -m experiments compare``: what two runs, or two cells, differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments import terminal

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.records.comparison import Comparison

_HELP = "A run (a directory or a file of records), or RUN:CELLS."
_LOOK: Mapping[str, Any] = {"header_style": "dim", "padding": (0, 2, 0, 0)}


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
) -> None:
    """Compare two runs cell by cell, or two cells: settings, figures, beyond intervals or not.

    CELLS are settings (`results/ablation:policy=disk,k=1`) or a part of ids; where each side has
    one cell, those two are compared, whatever they differ in. Exit status: 0; 2 if there is
    nothing to compare.
    """
    from experiments.records import difference, found
    from experiments.records.comparison import Comparison, few

    try:
        one, other = found.records(a), found.records(b)
        if len(one) == len(other) == 1:
            pairs = [Comparison(other[0], one[0])]
        else:
            pairs = difference.pairs(one, other)
        if not pairs:
            raise ValueError(
                f"{a} and {b} have no cell in common: give one cell of each, RUN:CELLS"
            )
    except (ValueError, OSError) as error:
        terminal.stop(error)
    console = terminal.console()
    console.print(_in_full(pairs[0]) if len(pairs) == 1 else _listed(pairs))
    if said := few(pairs):
        console.print(said)
    apart = sum(pair.differs for pair in pairs)
    left = max(len(one), len(other)) - len(pairs)
    alone = f"; {left} cells of the larger run have none in the other" if left else ""
    console.print(f"{apart} of {len(pairs)} cells differ beyond their intervals{alone}")


def _listed(pairs: Sequence[Comparison]) -> Table:
    from experiments.records import difference

    numbers = ("A s/step", "B s/step", "B over A", "A MB/step", "B MB/step")
    shown = ("s/step", "MB/step sent")
    table = terminal.table(["cell"], numbers, **_LOOK)
    for pair in pairs:
        seconds, sent = (map(_number, difference.figures(pair)[name]) for name in shown)
        table.add_row(pair.of.cell_id, *seconds, _speed(pair), *sent)
    return table


def _in_full(pair: Comparison) -> Table:
    from experiments.records import difference

    assert pair.over is not None
    table = terminal.table(["", "A", "B", "B / A"], **_LOOK)
    table.add_row("cell", pair.over.cell_id, pair.of.cell_id)
    for label, values in difference.settings(pair.over, pair.of).items():
        table.add_row(label.lower(), *values)
    table.add_section()
    for name, (mine, theirs) in difference.figures(pair).items():
        if mine is None and theirs is None:
            continue
        same = name in ("s/step", "tokens/s") and not pair.differs
        ratio = "none" if same else _ratio(mine, theirs)
        if name == "tokens/s" and pair.interval:
            ratio += " ({:.3g}–{:.3g})".format(*pair.interval)
        table.add_row(name, _number(mine), _number(theirs), ratio)
    return table


def _speed(pair: Comparison) -> str:
    """How many times as fast B is; none where that is not told from noise."""
    if pair.ratio is None:
        return " / ".join(record.state for record in (pair.over, pair.of) if record)
    return f"{pair.ratio:.2f}×" if pair.differs else "none"


def _ratio(mine: float | None, theirs: float | None) -> str:
    return f"{theirs / mine:.3g}" if mine and theirs is not None else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
