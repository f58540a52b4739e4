"""``python -m experiments show``: the runs below a directory, or the cells of one."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments import terminal
from experiments.records import select
from experiments.records.record import Record, read
from experiments.terminal.summary_table import STATE_STYLES, summary


def show(
    run: Annotated[
        str, typer.Argument(metavar="[DIR]", help="A run, RUN:CELLS, or a directory of runs.")
    ] = "runs",
) -> None:
    """List the runs below a directory; of one run, its cells and how they compare.

    A run whose records cannot be read has its name alone in the list, and says why.
    CELLS are settings (`results/ablation:policy=disk`) or a part of ids. Exit status: 0; 2 if there
    is no such run.
    """
    console = terminal.console()
    with terminal.stopping():
        path = Path(run)
        files = select.files(path) if path.exists() else []
        if len(files) > 1:
            console.print(_runs(files, path))
            return
        records = select.records(run)
    # Ids are for copying: no width cuts them.
    wide, longest = terminal.console(), max((len(of.cell_id) for of in records), default=0)
    wide.width = max(wide.width, _BESIDE_IDS + longest)
    wide.print(_cells(records))
    console.print(summary(records))


def _runs(files: Sequence[Path], path: Path) -> Table:
    columns = ("run", "evidence", "cells", "started", "commit")
    table = terminal.table(columns, header_style="dim")
    for file in files:
        name = str(file.parent.relative_to(path))
        try:
            records = read(file)
        except (ValueError, OSError) as error:
            table.add_row(name)
            terminal.say_error(str(error))
            continue
        states = Counter(record.state for record in records)
        first = min(records, key=lambda record: record.started_at, default=None)
        table.add_row(
            name,
            ", ".join(sorted({record.evidence for record in records})),
            ", ".join(f"{count} {state}" for state, count in states.items()),
            first.started_at[:16].replace("T", " ") if first else "–",
            (first.commit or "unknown")[:10] if first else "–",
        )
    return table


#: Width that all columns but that of ids take, in characters.
_BESIDE_IDS = 50


def _cells(records: Sequence[Record]) -> Table:
    words, numbers = ("cell", "state"), ("s/step", "tokens/s", "took")
    table = terminal.table(words, numbers, header_style="dim", padding=(0, 2, 0, 0))
    for record in records:
        seconds, tokens = record.step_seconds_median, record.tokens_per_s
        table.add_row(
            record.cell_id,
            record.state,
            "–" if seconds is None else f"{seconds:.3f}",
            "–" if tokens is None else f"{tokens:,.0f}",
            f"{record.seconds:.0f} s",
            style="" if record.state == "ok" else STATE_STYLES[record.state],
        )
    return table
