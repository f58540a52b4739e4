"""``python -m experiments sweep-cell``: runs one cell of a matrix, for W&B's agent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments import terminal
from experiments.commands import session
from experiments.matrix import reader
from experiments.matrix.reader import Matrix, MatrixCell
from experiments.runner import runner


def sweep_cell(
    matrix: Annotated[str, typer.Argument(metavar="MATRIX", help="As for `run`.")],
    settings: Annotated[
        list[str], typer.Argument(metavar="--SETTING=VALUE...", help="Which of its cells to run.")
    ],
) -> None:
    """Run one cell of a matrix for a W&B sweep, as `run MATRIX --resume` would, and write its run.

    Sweeps are in experiments/sweeps; W&B's agent calls this. Exit status: as for `run`.
    """
    with terminal.stopping():
        expanded = reader.read(matrix)
        cell = pick(expanded, settings)
    with session.opened(expanded, Path("runs") / expanded.name, resume=True) as (
        directory,
        finished,
    ):
        # The run that W&B's agent has made for this cell; outside a sweep there is none.
        sweep_run = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        records = session.run_cells(expanded, [cell], finished, directory, sweep_run=sweep_run)
        session.export(records, directory, sweep_run)
    if session.any_failed(records):
        raise typer.Exit(terminal.FAILED)


def pick(matrix: Matrix, arguments: Sequence[str]) -> MatrixCell:
    """The one cell of the matrix with the settings of ``--name=value`` arguments.

    Raises ``ValueError`` for a setting that there is not, a value that no cell has, and settings
    that leave more than one cell.
    """
    for argument in arguments:
        if not argument.startswith("--") or "=" not in argument:
            raise ValueError(f"{argument!r} is not a setting and its value, as in --steps=10")
    pattern = ",".join(argument.removeprefix("--") for argument in arguments)
    chosen = runner.select(matrix.cells, pattern, "--SETTING")
    if len(chosen) > 1:
        raise ValueError(
            f"{len(chosen)} cells of {matrix.name} are left, such as {chosen[0].cell.id} and "
            f"{chosen[1].cell.id}; give more settings"
        )
    return chosen[0]
