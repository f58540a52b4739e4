"""``python -m experiments sweep-cell``: runs one cell of a matrix, for W&B's agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments import terminal
from experiments.commands import session
from experiments.matrix import reader, sweep


def sweep_cell(
    matrix: Annotated[str, typer.Argument(metavar="MATRIX", help="As for `run`.")],
    settings: Annotated[
        list[str], typer.Argument(metavar="--SETTING=VALUE...", help="Which of its cells to run.")
    ],
) -> None:
    """Run one cell of a matrix for a W&B sweep, as `run MATRIX --resume` would, and write its run.

    Sweeps are in experiments/sweeps; W&B's agent calls this. Exit status: as for `run`.
    """
    try:
        expanded = reader.read(matrix)
        cell = sweep.pick(expanded, settings)
    except ValueError as error:
        terminal.stop(error)
    with session.opened(expanded, Path("runs") / expanded.name, resume=True) as (
        directory,
        finished,
    ):
        records = session.run_cells(expanded, [cell], finished, directory)
        session.export(terminal.console(), records, directory, sweep.run_id())
    if session.any_failed(records):
        raise typer.Exit(terminal.FAILED)
