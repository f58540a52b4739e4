"""Runs the cells of a matrix one after another, and records the end of each.

A cell's failure is its record's state, never the end of the matrix. A record is on the disk
before the next cell starts, so that a killed run loses only the cell that it was in.
"""

import os
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from baselines import pins, registry
from baselines.pins import Pin
from experiments.clusters import start_barrier
from experiments.clusters.interface import Cluster, Launch, LostNodeError, Outcome
from experiments.records import provenance
from experiments.records.cell import Cell
from experiments.records.record import Machine, Measurement, Record, State
from experiments.records.workload import Origin
from experiments.runner.directory import RunDirectory
from experiments.worker import CHECKPOINT
from fcdp.durable import COMMIT
from simulation import files

WORKER = "experiments.worker.worker:main"
OPERATORS = "baselines.deepspeed.engine:build_operators"
_CELL = "cell.json"
#: Seconds for a dozen files of C++ on two busy cores.
_COMPILE_TIMEOUT_S = 1800.0
#: Starts in a row without a new checkpoint, after which a cell has failed: what fails at the same
#: step each time comes to none.
_FRUITLESS = 3
#: Last lines that are quoted from the log of a rank that a signal ended, and bytes to find them.
_LAST_LINES = 20
_LAST_BYTES = 65_536


class RunError(RuntimeError):
    """An error that a run cannot survive; the message says why and what is kept."""


class Observer(Protocol):
    """A listener to a run while it goes on."""

    def cell_started(self, cell: Cell, directory: Path, started_at: str) -> None:
        """The cell's ranks are about to start; each appends to its ``progress`` file in there.

        ``started_at`` is that of its record.
        """
        ...

    def cell_finished(self, record: Record) -> None:
        """The cell has ended, and its record is on the disk."""
        ...


def run(
    cells: Sequence[Cell],
    skipped: Mapping[str, str],
    finished: Sequence[Record],
    cluster: Cluster,
    directory: RunDirectory,
    *observers: Observer,
) -> list[Record]:
    """Run the cells that have no record yet; return the records of all of them, in order.

    ``skipped`` has the reasons of those that are recorded without being run, by their ids.
    Raises ``ClusterError`` if the cluster cannot be built and ``RunError`` if a record cannot be
    written. ``KeyboardInterrupt`` passes through after the cluster is torn down.
    """
    by_id = {record.cell_id: record for record in finished}
    pending = [cell for cell in cells if cell.id not in by_id]
    if pending:
        runner = _Runner(cluster, directory, observers)
        with cluster:
            for cell in pending:
                by_id[cell.id] = runner.finish(cell, skipped.get(cell.id))
    return [by_id[cell.id] for cell in cells]


def write(cell: Cell, directory: Path) -> None:
    """Write the cell to its directory, where its ranks read it."""
    (directory / _CELL).write_text(cell.model_dump_json(indent=2) + "\n", encoding="utf-8")


def launch(
    cluster: Cluster, cell: Cell, directory: Path, entry: str, *arguments: str
) -> tuple[Outcome, dict[str, Any]]:
    """Launch ``entry`` on the ranks of a cell that is written, with its file and its directory.

    Returns also what the links between nodes were set to once the ranks were ready.
    """
    cluster.shape(None)
    with start_barrier.limiting(directory, lambda: cluster.shape(*cell.links)) as network:
        outcome = cluster.run(
            Launch(
                entry=entry,
                arguments=(str(directory / _CELL), str(directory), *arguments),
                logs=directory / "logs",
                environment=pins.variables(cell.deepspeed),
                timeout_s=cell.timeout_s,
                extra=cell.extra,
            )
        )
    return outcome, network


class _Runner:
    def __init__(
        self, cluster: Cluster, directory: RunDirectory, observers: Sequence[Observer]
    ) -> None:
        self._cluster = cluster
        self._directory = directory
        self._observers = observers
        self._origin = provenance.gather()
        self._load = os.getloadavg()[0]
        self._compiled: set[tuple[tuple[str, ...], Pin]] = set()

    def finish(self, cell: Cell, why_skipped: str | None = None) -> Record:
        """Run the cell, or skip it for a reason, and put its record on the disk."""
        try:
            if why_skipped is None:
                record = self._run(cell)
            else:
                record = self._record(cell, "skipped", why_skipped, files.now())
            files.append(record, self._directory.records)
        except OSError as error:
            raise RunError(
                f"{cell.id}: cannot write to {self._directory.path}: {error.strerror}; "
                f"all records before this cell are kept in {self._directory.records.name}, "
                "go on with --resume once it can be written to"
            ) from error
        for observer in self._observers:
            observer.cell_finished(record)
        return record

    def _run(self, cell: Cell) -> Record:
        directory = self._directory.new_cell(cell.id)
        write(cell, directory)
        started_at, started = files.now(), time.monotonic()
        for observer in self._observers:
            observer.cell_started(cell, directory, started_at)
        network: dict[str, Any] = {}
        measurement = None
        try:
            outcome = self._compile(cell, directory)
            started = time.monotonic()
            machine(self._load)  # steal is counted from now on
            if outcome.state == "ok":
                outcome, network = self._train(cell, directory)
            if outcome.state == "ok":
                file = directory / "measurement.json"
                if not file.exists():
                    problem = "all ranks ended without an error, but rank 0 wrote no"
                    raise RuntimeError(f"{problem} {file.name}")
                measurement = Measurement.model_validate_json(file.read_bytes())
                shutil.rmtree(directory / CHECKPOINT, ignore_errors=True)
        except LostNodeError as error:
            raise RunError(
                f"{cell.id}: {error}; this cell has no record, all before it are kept in "
                f"{self._directory.records.name}, go on with --resume"
            ) from error
        except Exception:
            # Whatever goes wrong in one cell, the others are still worth running.
            outcome = Outcome("failed", error=traceback.format_exc())
        return self._record(
            cell,
            outcome.state,
            _error(outcome, directory / "logs"),
            started_at,
            measurement=measurement,
            network=network,
            machine=machine(self._load) if self._cluster.can.start_processes else None,
            seconds=time.monotonic() - started,
        )

    def _train(self, cell: Cell, directory: Path) -> tuple[Outcome, dict[str, Any]]:
        """Start the ranks, and again if they fail where there are checkpoints.

        Returns their outcome and what the link was set to.
        """
        fruitless = 0
        while True:
            before = _commit(directory)
            outcome, network = launch(self._cluster, cell, directory, WORKER)
            fruitless = fruitless + 1 if _commit(directory) == before else 0
            again = cell.checkpoint_every and outcome.state == "failed" and fruitless < _FRUITLESS
            if not again:
                return outcome, network

    def _compile(self, cell: Cell, directory: Path) -> Outcome:
        """Compile the operators that the cell's engine would compile at their first use.

        That takes minutes, once per machine, which count toward no cell's time limit.
        """
        entry = registry.find(cell.strategy)
        needed = (entry.operators, cell.deepspeed)
        predicted = not self._cluster.can.start_processes
        if predicted or entry.engine != "deepspeed" or needed in self._compiled:
            return Outcome("ok")
        outcome = self._cluster.run(
            Launch(
                entry=OPERATORS,
                arguments=entry.operators,
                logs=directory / "operators",
                environment=pins.variables(cell.deepspeed),
                timeout_s=_COMPILE_TIMEOUT_S,
            )
        )
        if outcome.state == "ok":
            self._compiled.add(needed)
        return outcome

    def _record(
        self, cell: Cell, state: State, error: str | None, started_at: str, **fields: Any
    ) -> Record:
        """A cell's record; ``fields`` are those that only a cell which ran has."""
        deepspeed = pins.version(cell.deepspeed)
        pinned = {"deepspeed": deepspeed} if deepspeed else {}  # as the cell's ranks import it
        return Record(
            cell=cell.model_copy(update={"origin": Origin()}),  # records name no folders
            cell_id=cell.id,
            state=state,
            error=error,
            evidence=self._cluster.can.evidence,
            commit=self._origin.commit,
            versions=self._origin.versions | pinned,
            hardware=self._origin.hardware,
            started_at=started_at,
            **({"measurement": None, "network": {}, "seconds": 0.0} | fields),
        )


def _commit(directory: Path) -> bytes | None:
    """The mark of a cell's checkpoint, which every save changes; ``None`` without one."""
    file = directory / CHECKPOINT / COMMIT
    return file.read_bytes() if file.exists() else None


def _error(outcome: Outcome, logs: Path) -> str | None:
    if outcome.state == "ok":
        return None
    lines = [outcome.error or "no error text"]
    if outcome.rank is not None:
        lines[0] = f"rank {outcome.rank}: {lines[0]}"
    log = logs / f"rank{outcome.rank}.log"
    # A signal leaves no traceback, but perhaps last words.
    if (outcome.error or "").startswith("killed by signal"):
        end = ""
        with suppress(OSError), log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            end = file.read().decode("utf-8", errors="replace")
        if tail := end.strip().splitlines()[-_LAST_LINES:]:
            # In front, as a traceback: the last line is the one that names the error.
            lines = ["last lines of the log:", *tail, *lines]
    return provenance.scrub("\n".join(lines))


#: Seconds for which a run observes the machine before it starts.
_LOOK_S = 0.5


def look() -> Machine:
    """Observe the machine for a moment, before a run adds its own load."""
    return machine(os.getloadavg()[0], _LOOK_S)


def machine(load: float, seconds: float | None = None) -> Machine:
    """The machine's state over the next ``seconds``, or since this thread's last call."""
    taken = psutil.cpu_times_percent(seconds).steal
    return Machine(load=load, cores=len(provenance.cores()), steal_share=taken / 100)
