"""A stand-in for a cluster, and made-up records, for the runner's tests.

The cluster is real in what the runner sees of one: logs, the start barrier, progress, and how a
launch ends. What it does not do is start ranks and train: it writes a made-up measurement itself.
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from experiments.clusters import start_barrier
from experiments.clusters.interface import ClusterError, Launch, Outcome
from experiments.records.abilities import ABILITIES
from experiments.records.cell import Cell
from experiments.records.provenance import ROOT
from experiments.records.record import Measurement, Record, State
from experiments.runner.runner import OPERATORS, WORKER
from experiments.worker import PROGRESS
from tests.experiments import cells
from tests.experiments.golden import tables

_FIGURES: Mapping[str, Any] = tables(__file__)


class StandInCluster:
    """Implements ``experiments.clusters.interface.Cluster`` without processes.

    ``behaviours`` maps a part of a cell's id to what its ranks do: ``raise`` an error on rank 1,
    or ``abort`` there, ``hang``, ``learn otherwise``, end ``silent``ly without a measurement, be
    killed for memory (``oom``), or not even start because the cluster raises (``broken``). With
    ``helper`` the cluster first forks a process and ends it with SIGTERM, as network libraries do.
    """

    can = ABILITIES["emulated"]

    def __init__(self, behaviours: Mapping[str, str] | None = None) -> None:
        self.behaviours = behaviours or {}
        self.entered = False
        self.shapes: list[int | None] = []
        #: Ids of the cells whose ranks were started, in order.
        self.started: list[str] = []
        #: Arguments of what was compiled, in order.
        self.compiled: list[tuple[str, ...]] = []

    def __enter__(self) -> StandInCluster:
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.entered = False

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        self.shapes.append(bits_per_s)
        return {"rate_bits_per_s": bits_per_s}

    def run(self, launch: Launch) -> Outcome:
        assert self.entered
        if launch.entry == OPERATORS:
            self.compiled.append(launch.arguments)
            error = self.behaviours.get("compiler")
            return Outcome("ok") if error is None else Outcome("failed", 0, error)
        assert launch.entry == WORKER
        cell_file, output = map(Path, launch.arguments)
        cell = Cell.model_validate_json(cell_file.read_bytes())
        self.started.append(cell.id)
        logs, timeout_s = launch.logs, launch.timeout_s
        logs.mkdir(parents=True, exist_ok=True)
        behaviour = next((b for part, b in self.behaviours.items() if part in cell.id), "train")
        match behaviour:
            case "broken":
                raise ClusterError("the port is taken")
            case "quote":
                raise RuntimeError(f"all that is here: {os.environ}")
            case "oom":
                return Outcome("oom", 1, "killed: out of memory")
            case "hang":
                time.sleep(timeout_s)
                return Outcome("timeout", None, f"not finished after {timeout_s:g} s")
            case "helper":
                _end_a_forked_helper()
        start_barrier.wait(output)
        made = measurement()
        with (output / PROGRESS).open("a", encoding="utf-8") as file:
            for step in range(1, cell.steps + 1):
                line = {"step": step, "of": cell.steps, "loss": 5.5, "seconds": 0.1, "at": 0.0}
                print(json.dumps(line), file=file, flush=True)
        match behaviour:
            case "raise":
                where = f'Traceback\n  File "{ROOT}/worker.py"'
                return Outcome("failed", 1, f"{where}\nRuntimeError: rank 1 raises\n")
            case "abort":
                log = "\n".join([*map(str, range(100)), "terminate called"])
                (logs / "rank1.log").write_text(log)
                return Outcome("failed", 1, "killed by signal SIGABRT")
            case "learn otherwise":
                made.losses[-1] += 1e-5
        if behaviour != "silent":
            (output / "measurement.json").write_text(made.model_dump_json())
        return Outcome("ok")


def _end_a_forked_helper() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, b"!")
            time.sleep(30)
        finally:
            os._exit(1)
    os.read(reader, 1)  # what a fork sets up in the child is set up
    os.close(reader)
    os.close(writer)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGTERM:
        raise ClusterError("the helper handled a signal that was meant to end it")


class Observer:
    """Counts the cells of a run."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[Record] = []

    def cell_started(self, cell: Cell, directory: Path, started_at: str) -> None:
        self.started.append(cell.id)

    def cell_finished(self, record: Record) -> None:
        self.finished.append(record)


def matrix_file(
    directory: Path,
    extra: str = "",
    steps: int = 2,
    *,
    cluster: str = "nodes: 2, ranks_per_node: 1, cores: shared",
    strategies: str = "deepspeed-zero3, fsdp2, fcdp",
    links: str = "100 Mbit/s, 10 Mbit/s",
    timeout_s: float = 20,
) -> Path:
    """A matrix of six small cells: three strategies at two bandwidths, unless others are given."""
    file = directory / "small.yaml"
    given = {"cluster": cluster, "strategies": strategies, "links": links, "timeout_s": timeout_s}
    text = Template(Path(__file__).with_name("small.yaml").read_text(encoding="utf-8"))
    filled = text.substitute(given, steps=steps)
    file.write_text(filled + textwrap.dedent(extra), encoding="utf-8")
    return file


def cell(**changes: Any) -> Cell:
    usual: dict[str, Any] = {
        "matrix": "small",
        "strategy": "fcdp",
        "model": cells.model_spec("llama", layers=4),
        "inter_bandwidth_bits_per_s": 100_000_000,
        "sequence_length": 128,
        "timeout_s": 60.0,
    }
    return cells.cell(**(usual | changes))


def measurement(**changes: Any) -> Measurement:
    """A made-up measurement: one warm-up step, six steps of a median of half a second."""
    return Measurement(**(_FIGURES | changes))


def record(of: Cell, state: State = "ok", error: str | None = None, **figures: Any) -> Record:
    """A made-up record of a cell; ``figures`` change its measurement."""
    return Record(
        cell=of,
        cell_id=of.id,
        state=state,
        error=error,
        evidence="emulated",
        measurement=measurement(**figures) if state == "ok" else None,
        commit="0123456789abcdef0123456789abcdef01234567",
        versions={"torch": "2.13.0"},
        hardware={"cpu": "a processor"},
        network={"rate_bits_per_s": of.inter_bandwidth_bits_per_s},
        started_at="2026-01-01T00:00:00+00:00",
        seconds=12.0,
    )


def main() -> None:
    """The command line of ``python -m experiments`` on a stand-in cluster.

    ``STAND_IN`` holds the cluster's arguments as JSON, and ``report: false`` to draw nothing.
    """
    from experiments.__main__ import app

    take_the_place_of_clusters(setattr, json.loads(os.environ.get("STAND_IN", "{}")))
    app()


def take_the_place_of_clusters(put: Callable[[Any, str, Any], None], spec: dict[str, Any]) -> None:
    """Have commands run their cells here; ``spec`` has the cluster's arguments, and ``report``."""
    from experiments.commands import kinds, session

    arguments = dict(spec)
    if not arguments.pop("report", False):
        put(session, "draw", lambda *_: True)
    put(kinds, "enter_namespace", lambda: None)
    put(kinds, "cluster", lambda *_: StandInCluster(**arguments))


if __name__ == "__main__":
    main()
