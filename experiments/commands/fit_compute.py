"""``python -m experiments fit-compute``: rates of computation, fitted and checked."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments import terminal
from experiments.records import provenance
from simulation import calibration, compute
from simulation.compute import ROWS, read_rows


def fit_compute(
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rows to fit, as results/compute/measured.csv has them."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only predict these rows, by the committed constants."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where fit.json goes.")] = Path(
        "runs/compute"
    ),
) -> None:
    """Fit the planner's rates of computation to published measurements, or check them on others.

    Matrix products have a share of the data sheet per GPU, attention and bytes through memory one
    per architecture; what launches, exchanges and scale cost is common to all. Whole sources are
    left out and predicted. Rows that are not in bf16 are left out.
    """
    console = terminal.console()
    with terminal.stopping():
        if check is not None:
            errors = calibration.errors(read_rows(check), compute.read().fitted())
            console.print(_checks([errors]))
            return
        file = output / "fit.json"
        terminal.check_writable("--output", file)
        commit = provenance.gather().commit
        record = calibration.settle(read_rows(rows or ROWS), commit)
        file.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    console.print(_constants(record.constants))
    console.print(_checks(record.checks))
    terminal.say("record", file)


def _constants(constants: Iterable[compute.Constant]) -> Table:
    table = terminal.table(["constant"], ["value", "from", "to"])
    for constant in constants:
        numbers = (constant.value, constant.low, constant.high)
        table.add_row(constant.name, *(f"{number:.3g}" for number in numbers))
    return table


def _checks(checks: Iterable[compute.Check]) -> Table:
    numbers = ("rows", "median error", "nine of ten within", "worst")
    table = terminal.table(["left out and predicted"], numbers)
    for check in checks:
        shares = (check.median, check.nine_of_ten, check.worst)
        table.add_row(check.what, f"{check.rows}", *(f"{share:.1%}" for share in shares))
    return table
