"""``python -m experiments compare``: what two runs, or two cells, differ in."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from experiments import terminal
from experiments.records import select
from experiments.records import settings as of_cells
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, few, paired
from experiments.records.record import Record

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
    with terminal.stopping():
        a_records, b_records = select.records(a), select.records(b)
        if len(a_records) == len(b_records) == 1:
            pairs = [Comparison(b_records[0], a_records[0])]
        else:
            # Cells that are alike but for matrix and what changes no step.
            pairs = [Comparison(b, a) for a, b in paired(a_records, reversed(b_records), _key)]
        if not pairs:
            raise ValueError(
                f"{a} and {b} have no cell in common: give one cell of each, RUN:CELLS"
            )
    console = terminal.console()
    if len(pairs) == 1:  # ids are for copying: no width cuts them
        terminal.say_as_it_is(f"A  {a_records[0].cell_id}\nB  {b_records[0].cell_id}")
    console.print(_in_full(pairs[0]) if len(pairs) == 1 else _listed(pairs))
    if warning := few(pairs):
        console.print(warning)
    apart = sum(pair.differs for pair in pairs)
    left = max(len(a_records), len(b_records)) - len(pairs)
    alone = f"; {left} cells of the larger run have none in the other" if left else ""
    console.print(f"{apart} of {len(pairs)} cells differ beyond their intervals{alone}")


def _listed(pairs: Sequence[Comparison]) -> Table:
    numbers = ("A s/step", "B s/step", "B over A", "A MB/step", "B MB/step")
    shown = ("s/step", "MB/step sent")
    table = terminal.table(["cell"], numbers, **_LOOK)
    for pair in pairs:
        assert pair.over is not None
        both = _figures(pair.over), _figures(pair.of)
        seconds, sent = ([_number(of[name]) for of in both] for name in shown)
        table.add_row(pair.of.cell_id, *seconds, _speed(pair), *sent)
    return table


def _in_full(pair: Comparison) -> Table:
    assert pair.over is not None
    table = terminal.table(["", "A", "B", "B / A"], **_LOOK)
    for label, values in _settings(pair.over, pair.of).items():
        table.add_row(label.lower(), *values)
    table.add_section()
    theirs_by = _figures(pair.of)
    for name, mine in _figures(pair.over).items():
        theirs = theirs_by[name]
        if mine is None and theirs is None:
            continue
        same = name in ("s/step", "tokens/s") and not pair.differs
        ratio = f"{theirs / mine:.3g}" if mine and theirs is not None else "–"
        ratio = "not significant" if same else ratio
        if name == "tokens/s" and pair.interval:
            ratio += " ({:.3g}–{:.3g})".format(*pair.interval)
        table.add_row(name, _number(mine), _number(theirs), ratio)
    return table


def _speed(pair: Comparison) -> str:
    """How many times as fast B is; or that it may be noise."""
    if pair.ratio is None:
        return " / ".join(record.state for record in (pair.over, pair.of) if record)
    return f"{pair.ratio:.2f}×" if pair.differs else "not significant"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _settings(a: Record, b: Record) -> Mapping[str, tuple[str, str]]:
    """Settings in which two cells differ, by label: both values in words."""
    by_label = {}
    for item in of_cells.described(Cell).values():
        mine, theirs = item.of(a.cell), item.of(b.cell)
        if mine != theirs and not item.name.endswith("_in_full"):
            by_label[item.setting.label] = item.written(mine), item.written(theirs)
    if a.evidence != b.evidence:
        by_label["Evidence"] = a.evidence, b.evidence
    return by_label


def _key(record: Record) -> tuple[object, ...]:
    names = of_cells.names(Cell, "condition", "subject")
    chosen = of_cells.values(record.cell, [name for name in names if name != "matrix"])
    return tuple(chosen.values())


def _figures(record: Record) -> dict[str, float | None]:
    """Figures of a cell, by the name that a comparison shows."""
    measured = record.measurement
    cache = measured.cache if measured else None
    return {
        "s/step": record.step_seconds_median,
        "tokens/s": record.tokens_per_s,
        "MB/step sent": _mega(measured and measured.inter_node_bytes_per_step),
        "peak host MB": _mega(measured and measured.peak_host_bytes),
        "peak device MB": _mega(measured and measured.peak_device_bytes),
        "hits/step": cache.hits_per_step if cache else None,
        "misses/step": cache.misses_per_step if cache else None,
        "last loss": measured.losses[-1] if measured and measured.losses else None,
    }


def _mega(count: float | object | None) -> float | None:
    return count / 1e6 if isinstance(count, int | float) else None
