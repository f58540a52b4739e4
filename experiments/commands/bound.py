"""``python -m experiments bound``: how much of a GPU memory and bandwidth let FSDP use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments import terminal
from experiments.records import provenance
from simulation import files
from simulation.bound import GPU, SEQUENCE_LENGTH, BoundRecord, points, settle


def bound(
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where bound.jsonl goes.")] = Path(
        "runs/bound"
    ),
) -> None:
    """Bound FSDP's utilisation by free memory × bandwidth / peak rate, for 1.3B to 310B on A100s.

    The closed form of "Memory and Bandwidth are All You Need for FSDP"; nothing is run.
    """
    commit = provenance.gather().commit
    records = [settle(point, commit) for point in points()]
    file = output / "bound.jsonl"
    with terminal.stopping():
        terminal.check_writable("--output", file)
        files.write(records, file)
    terminal.console().print(_table(records))
    terminal.say("records", file)


def _table(records: Sequence[BoundRecord]) -> Table:
    columns = ("GPUs", "Gbit/s", "free GB", "tokens", "bound", "needs Gbit/s", "best MFU")
    table = terminal.table(["model"], columns)
    table.title = f"{GPU}, {SEQUENCE_LENGTH} tokens per sequence: closed form, simulated"
    for record in records:
        point = record.point
        table.add_row(
            point.model,
            f"{point.gpus}",
            f"{point.bandwidth_bits_per_s / 1e9:g}",
            f"{record.free_bytes / 1e9:.1f}",
            f"{record.tokens:,.0f}",
            f"{record.hfu_bound:.3g}",
            f"{record.required_bits_per_s / 1e9:.3g}",
            f"{record.best_mfu:.1%}",
        )
    return table
