"""A stand-in for a cluster and its worker, and made-up records, for the runner's tests.

The cluster is real in what the runner sees of one: it starts a process a rank, waits for them,
and kills them when the time is over. What it does not do is train: rank 0 writes a made-up
measurement.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from baselines.description import ExtraProcess
from experiments.clusters.causes import describe_exit
from experiments.clusters.interface import ClusterError, Outcome
from experiments.records.abilities import ABILITIES
from experiments.records.cell import Cell
from experiments.records.record import Measurement, Record, State
from experiments.runner.runner import OPERATORS, WORKER
from tests.experiments import cells

#: What each rank runs; it imports nothing of ours, so that a rank costs milliseconds.
_RANK = """
import ctypes, json, os, pathlib, sys, time
ctypes.CDLL(None).prctl(1, 9)  # as every rank it dies with who started it
cell_file, output, behaviour = sys.argv[1:]
output = pathlib.Path(output)
cell = json.loads(pathlib.Path(cell_file).read_text())
rank = int(os.environ["RANK"])
if behaviour == "hang":
    time.sleep(600)
if behaviour == "raise" and rank == 1:
    raise RuntimeError("rank 1 raises")
if behaviour == "abort" and rank == 1:
    print(*range(100), "terminate called", sep="\\n", flush=True)
    os.abort()
if rank == 0:
    (output / "ready").touch()
    while not (output / "open").exists():
        time.sleep(0.005)
    with (output / "progress.jsonl").open("a") as file:
        for step in range(cell["steps"]):
            time.sleep(float(os.environ["STEP_SECONDS"]))
            line = {"step": step + 1, "of": cell["steps"], "loss": 5.5 - step, "seconds": 0.1}
            file.write(json.dumps(line) + "\\n")
            file.flush()
    measurement = json.loads(os.environ["MEASUREMENT"])
    if behaviour == "learn otherwise":
        measurement["losses"][-1] += 1e-5
    if behaviour != "silent":
        (output / "measurement.json").write_text(json.dumps(measurement))
"""


class StandInCluster:
    """Implements ``experiments.clusters.interface.Cluster`` by plain subprocesses.

    ``behaviours`` maps a part of a cell's id to what its ranks do: ``raise`` an error on rank 1,
    or ``abort`` there, ``hang``, ``learn otherwise``, end ``silent``ly without a measurement, be
    killed for memory (``oom``), or not even start because the cluster raises (``broken``). With
    ``helper`` the cluster first forks a process and ends it with SIGTERM, as network libraries do.
    """

    can = ABILITIES["emulated"]

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int = 1,
        behaviours: Mapping[str, str] | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.behaviours = behaviours or {}
        self.step_seconds = step_seconds
        self.entered = False
        self.shapes: list[int | None] = []
        #: Ids of the cells whose ranks were started, in order.
        self.started: list[str] = []
        #: What was compiled, in order.
        self.compiled: list[tuple[str, ...]] = []

    def __enter__(self) -> StandInCluster:
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.entered = False

    def shape(self, bits_per_s: int | None, to_groups: int | None = None) -> dict[str, Any]:
        self.shapes.append(bits_per_s)
        return {"rate_bits_per_s": bits_per_s}

    def run(
        self,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: Path,
        environment: Mapping[str, str],
        timeout_s: float,
        extra: Sequence[ExtraProcess] = (),
    ) -> Outcome:
        assert self.entered
        if entry == OPERATORS:
            self.compiled.append(tuple(arguments))
            if "compiler" in self.behaviours:
                return Outcome("failed", 0, self.behaviours["compiler"])
            return Outcome("ok")
        assert entry == WORKER
        cell_file, _ = arguments
        cell = Cell.model_validate_json(Path(cell_file).read_bytes())
        self.started.append(cell.id)
        behaviour = next((b for part, b in self.behaviours.items() if part in cell.id), "train")
        if behaviour == "broken":
            raise ClusterError("the port is taken")
        if behaviour == "quote":
            raise RuntimeError(f"all that is here: {os.environ}")
        if behaviour == "helper":
            _end_a_forked_helper()
        if behaviour == "oom":
            return Outcome("oom", 1, "killed: out of memory")
        logs.mkdir(parents=True)
        ranks = [
            self._start([*arguments, behaviour], logs, environment, rank)
            for rank in range(self.nodes * self.ranks_per_node)
        ]
        return self._wait(ranks, logs, timeout_s)

    def _start(
        self, arguments: Sequence[str], logs: Path, environment: Mapping[str, str], rank: int
    ) -> subprocess.Popen[bytes]:
        with (logs / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", _RANK, *arguments],
                env={
                    **environment,
                    "RANK": str(rank),
                    "STEP_SECONDS": str(self.step_seconds),
                    "MEASUREMENT": measurement().model_dump_json(),
                },
                stdout=log,
                stderr=log,
            )

    def _wait(
        self, ranks: Sequence[subprocess.Popen[bytes]], logs: Path, timeout_s: float
    ) -> Outcome:
        deadline = time.monotonic() + timeout_s
        try:
            for rank, process in enumerate(ranks):
                code = process.wait(max(0.0, deadline - time.monotonic()))
                if code < 0:
                    return Outcome("failed", rank, describe_exit(code))
                if code:
                    return Outcome("failed", rank, (logs / f"rank{rank}.log").read_text())
        except subprocess.TimeoutExpired:
            return Outcome("timeout", None, f"not finished after {timeout_s:g} s")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
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
    name: str = "small",
    extra: str = "",
    steps: int = 2,
    *,
    cluster: str = "nodes: 2, ranks_per_node: 1",
    strategies: str = "deepspeed-zero3, fsdp2, fcdp",
    links: str = "100 Mbit/s, 10 Mbit/s",
    timeout_s: float = 20,
) -> Path:
    """A matrix of six small cells: three strategies at two bandwidths, unless others are given."""
    file = directory / f"{name}.yaml"
    text = f"""\
        name: {name}
        description: small cells for a test
        cluster: {{{cluster}}}
        models:
          - {{name: tiny, family: gpt2, layers: 1, width: 8, heads: 1}}
        axes:
          strategy: [{strategies}]
          inter_bandwidth: [{links}]
        workload:
          model: tiny
          tuning: full
          sequence_length: 16
          micro_batch: 1
          accumulation: 1
          dtype: float32
          lora_rank: 4
          learning_rate: 0.001
          warmup_steps: 0
          steps: {steps}
          timeout_s: {timeout_s}
        """
    file.write_text(textwrap.dedent(text) + textwrap.dedent(extra), encoding="utf-8")
    return file


def cell(**changes: Any) -> Cell:
    """A cell with some of its settings changed."""
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
    figures: dict[str, Any] = {
        "engine": "stand-in",
        "engine_version": "1",
        "policy": None,
        "parameters": 1000,
        "trainable_parameters": 1000,
        "step_seconds": [0.4, 0.5, 0.6] * 2,
        "losses": [5.6, 5.5, 5.4, 5.3],
        "inter_node_bytes_per_step": 6.3e6,
        "inter_node_bytes_closed_form": 6.0e6,
        "ledger_bytes_per_step": None,
        "peak_host_bytes": 10**9,
        "host_cache_bytes": None,
        "peak_device_bytes": None,
    }
    return Measurement(**(figures | changes))


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


def take_the_place_of_clusters(put: Callable[[Any, str, Any], None], given: dict[str, Any]) -> None:
    """Have commands run their cells here; ``given`` are the cluster's arguments, and ``report``."""
    from experiments.commands import kinds, session

    arguments = dict(given)
    if not arguments.pop("report", False):
        put(session, "draw", lambda *_: True)
    put(kinds, "enter_namespace", lambda: None)
    made = functools.partial(StandInCluster, **arguments)
    put(kinds, "cluster", lambda spec, _: made(spec.nodes, spec.ranks_per_node))


if __name__ == "__main__":
    main()
