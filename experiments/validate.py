"""``python -m experiments validate``: what the simulator predicts for cells that were run.

Predictions are records of the same cells, and so of the same ids, in a file of their own beside
what was counted and timed; ``analysis`` joins the two.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from experiments import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from experiments.provenance import Provenance
    from experiments.records import Record
    from experiments.simulator.validation import Comparison

#: Beside the records of the cells.
PREDICTIONS = "predicted.jsonl"
_RESULTS = Path("results")


def validate(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULTS]...",
            help="Folders that hold a records.jsonl of emulated cells; by default all in results.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare the simulator's steps with those that were run: time, and bytes between nodes.

    Writes RESULTS/predicted.jsonl, from which `python -m analysis report` draws. Exit status: 0;
    2 if no cell was run on a cluster that the simulator knows.
    """
    from experiments import provenance
    from experiments.records import read

    origin = provenance.gather()
    compared: dict[str, list[Comparison]] = {}
    try:
        for folder in results or sorted(file.parent for file in _RESULTS.rglob("records.jsonl")):
            found = _compare(read(folder / "records.jsonl"))
            if found:
                compared[terminal.shown(folder)] = found
                _write(found, folder / PREDICTIONS, origin)
    except (OSError, ValueError) as error:
        terminal.stop(str(error))
    if not compared:
        where = ", ".join(map(str, results or [_RESULTS]))
        terminal.stop(f"{where}: no cell of an emulated cluster that ran to its end")
    terminal.console().print(_table(compared))


def _compare(records: Sequence[Record]) -> list[Comparison]:
    """Only cells of the host that the simulator's constants are of."""
    from experiments.simulator.validation import compare

    return compare([record for record in records if record.evidence == "emulated"])


def _write(compared: Sequence[Comparison], file: Path, origin: Provenance) -> None:
    from experiments import records

    file.unlink(missing_ok=True)
    for comparison in compared:
        records.append(_predicted(comparison, origin), file)


def _predicted(comparison: Comparison, origin: Provenance) -> Record:
    from experiments.clusters.simulated import measured
    from experiments.costs.workload import Workload
    from experiments.records import Record
    from experiments.simulator.validation import hardware_of

    cell = comparison.record.cell
    return Record(
        cell=cell,
        cell_id=comparison.record.cell_id,
        state="ok",
        error=None,
        evidence="simulated",
        measurement=measured(Workload.of(cell), hardware_of(cell), comparison.prediction),
        commit=origin.commit,
        versions=origin.versions,
        hardware=origin.hardware,
        network={},
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=0.0,
    )


def _table(compared: dict[str, list[Comparison]]) -> Table:
    """A row for each folder's cells with a link that was limited, and for those without."""
    from rich.table import Table

    from experiments.simulator.validation import median_absolute_error

    table = Table("records", "link", box=None)
    errors = ("median error of s/step", "largest")
    for column in ("cells", *errors, "bytes agree", "counted/predicted"):
        table.add_column(column, justify="right")
    for folder, found in compared.items():
        for link in ("limited", "unshaped"):
            cells = [c for c in found if _is_limited(c) == (link == "limited")]
            if not cells:
                continue
            largest = max((c.relative_error for c in cells), key=abs)
            agree = sum(c.bytes_agree for c in cells)
            error = f"{100 * median_absolute_error(cells):.1f} %"
            farthest = max((c.counted_share for c in cells), key=lambda share: abs(share - 1))
            share = f"{median(c.counted_share for c in cells):.3f}, farthest {farthest:.2f}"
            off = f"{100 * largest:+.0f} %"
            table.add_row(folder, link, f"{len(cells)}", error, off, f"{agree}", share)
    return table


def _is_limited(comparison: Comparison) -> bool:
    return comparison.record.cell.inter_bandwidth_bits_per_s is not None
