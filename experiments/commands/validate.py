"""``python -m experiments validate``: compares the simulator with cells that were run.

Predictions are records of the same cells, and so of the same ids, in a file of their own beside
what was counted and timed; ``analysis`` joins the two.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments import terminal
from experiments.clusters.simulated import assumed, measured
from experiments.commands import session
from experiments.matrix import reader
from experiments.preflight.schema import Preflight, hardware_of
from experiments.records import allowed, provenance, select
from experiments.records.cell import Cell
from experiments.records.modelled import cluster_of, measured_step
from experiments.records.record import Record, read
from simulation import files
from simulation.calibration import calibrate as fit_host
from simulation.emulated import (
    Comparison,
    Constants,
    MeasuredStep,
    largest_error,
    median_error,
    shares,
)
from simulation.hardware import Hardware
from simulation.prediction import predict

#: Predictions as records, each with its comparison with the measured step.
Compared = list[tuple[Record, Comparison]]


#: The matrix to whose cells this machine's constants are fitted.
CALIBRATION = "calibration"


@dataclass(frozen=True)
class _Known:
    """The hosts and the nodes whose cells can be predicted."""

    #: Constants of the host that emulated clusters ran on; ``None``: of the committed records'.
    constants: Constants | None
    #: A cluster of real nodes as preflight measured it, if it did.
    nodes: Hardware | None

    def knows(self, record: Record) -> bool:
        """Whether there is a cluster on which to predict the cell, and something to compare."""
        if record.evidence == "emulated":
            return not record.hardware.get("gpu")  # the constants are of CPUs
        return record.evidence == "measured" and self.nodes is not None

    def hardware(self, cell: Cell) -> Hardware:
        """The cluster that the cell ran on; ``ValueError`` if preflight measured another one."""
        if cell.cluster.kind == "emulated":
            return cluster_of(cell, self.constants)
        shape = cell.cluster.nodes, cell.cluster.ranks_per_node
        assert self.nodes is not None, "see knows()"
        if shape != (self.nodes.nodes, self.nodes.ranks_per_node):
            raise ValueError(
                f"--preflight: is of {self.nodes.nodes} × {self.nodes.ranks_per_node} ranks; "
                f"{cell.id} ran on {shape[0]} × {shape[1]}, measure these"
            )
        return self.nodes


def validate(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RESULTS]...",
            help="Runs, or folders of them; by default all in results.",
            show_default=False,
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine's constants first (in runs/calibration, minutes, once), "
            "and predict emulated cells with them; RESULTS must be of this machine.",
        ),
    ] = False,
    preflight: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `preflight` measured of the nodes of RESULTS."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --preflight: the GPUs' data sheet, such as a40.")
    ] = None,
) -> None:
    """Compare the simulator's steps with those that were run: time, and bytes between nodes.

    Emulated cells are predicted with the constants of the host that the committed records were
    measured on, or with this machine's (--calibrate); cells of real nodes with --preflight only.

    Writes RESULTS/predicted.jsonl, from which `python -m analysis report` draws. Exit status: 0;
    2 if no cell was run on a cluster that the simulator knows.
    """
    origin = provenance.gather()
    compared: dict[str, Compared] = {}
    with terminal.stopping():
        if calibrate and not results:
            raise ValueError(
                "RESULTS: is missing; with --calibrate say which runs of this machine are "
                "predicted, such as runs/quickstart"
            )
        constants, host = None, "the host of the committed records"
        if calibrate:
            constants, host = _calibrated(), "this machine, from runs/calibration"
        nodes = None if preflight is None else hardware_of(Preflight.read(preflight), gpu)
        known = _Known(constants, nodes)
        folders = results or [Path("results")]
        for file in (file for folder in folders for file in select.files(folder)):
            pairs = _compare(read(file), known, file.parent, origin)
            if pairs:
                predictions = file.with_name(select.PREDICTIONS)
                compared[terminal.shown(file.parent)] = pairs
                terminal.check_writable("RESULTS", predictions)
                files.write([predicted for predicted, _ in pairs], predictions)
    if not compared:
        where = ", ".join(map(str, folders))
        terminal.stop(f"{where}: no cell that ran to its end on a cluster that is simulated")
    terminal.console().print(_table(compared))
    terminal.console().print(f"constants of {host}", highlight=False)


def _calibrated() -> Constants:
    """This machine's constants, by the matrix ``calibration``, whose cells run if need be."""
    matrix = reader.read(CALIBRATION)
    with session.opened(matrix, Path("runs") / matrix.name, resume=True) as (directory, finished):
        records = session.run_cells(matrix, matrix.cells, finished, directory)
        steps = (measured_step(record, cluster_of(record.cell)) for record in records)
        return fit_host([step for step in steps if step is not None])


def _compare(
    records: Sequence[Record], known: _Known, folder: Path, origin: provenance.Provenance
) -> Compared:
    """Compare what can be predicted; says what cannot, and why."""
    left_out = sum(r.evidence == "measured" and not known.knows(r) for r in records)
    if left_out:
        terminal.say_error(
            f"{folder}: {left_out} measured cells are left out, as their nodes are not known: "
            "give what `python -m experiments preflight` measured there with --preflight"
        )
    unknown = Counter(filter(None, (allowed.why_not_simulated(record.cell) for record in records)))
    for reason, count in unknown.items():
        terminal.say_error(f"{folder}: {count} cells are left out, each of which {reason}")
    pairs = []
    for record in filter(known.knows, records):
        if record.measurement is None or allowed.why_not_simulated(record.cell):
            continue
        step = measured_step(record, known.hardware(record.cell))
        if step is not None:
            pairs.append(_predicted(record, step, known, origin))
    return pairs


def _predicted(
    of: Record, step: MeasuredStep, known: _Known, origin: provenance.Provenance
) -> tuple[Record, Comparison]:
    prediction = predict(step.workload, step.hardware)
    by_default = known.constants is None and known.nodes is None
    record = Record(
        cell=of.cell,
        cell_id=of.cell_id,
        state="ok",
        error=None,
        evidence="simulated",
        measurement=measured(step.workload, step.hardware, prediction),
        **vars(origin),
        # The committed constants are known by the commit.
        network={} if by_default else assumed(step.hardware),
        started_at=files.now(),
        seconds=0.0,
    )
    return record, Comparison.of(step, prediction)


def _table(compared: dict[str, Compared]) -> Table:
    """A row for each folder's cells whose link was limited, and one for the others."""
    errors = ("median error of s/step", "largest")
    numbers = ("cells", *errors, "bytes agree", "counted/predicted")
    table = terminal.table(["records", "link"], numbers)
    for folder, pairs in compared.items():
        for link in ("limited", "unshaped"):
            cells = [
                comparison
                for record, comparison in pairs
                if (record.cell.inter_bandwidth_bits_per_s is None) == (link == "unshaped")
            ]
            if not cells:
                continue
            error, agree = f"{100 * median_error(cells):.1f} %", sum(c.bytes_agree for c in cells)
            share = "{:.3f}, farthest {:.2f}".format(*shares(cells))
            largest = largest_error(cells)
            table.add_row(folder, link, f"{len(cells)}", error, largest, f"{agree}", share)
    return table
