"""A matrix of one cell on two nodes of this machine, run by the command line on the first."""

import os
import subprocess
import sys
import time
from pathlib import Path

from experiments import terminal
from experiments.clusters import namespaces
from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from experiments.records.record import Measurement, Record
from experiments.records.record import read as read_records
from experiments.worker import PROGRESS
from tests.experiments.stand_in import matrix_file
from tests.experiments.waiting import is_running, wait_until

#: Seconds within which a lost node must have ended the run.
_AT_MOST_S = 60


class Run:
    """One run of the matrix, by the command line on the first node."""

    def __init__(self, folder: Path, before: list[str], variables: dict[str, str]) -> None:
        self.folder = folder
        self.output = folder / "hidden"
        self.output.mkdir(exist_ok=True)
        self._before = before
        self.variables = variables

    def command(self, steps: int) -> list[str]:
        """The words after ``python -m experiments``; a cell's id has its number of steps."""
        matrix = matrix_file(
            self.folder,
            steps=steps,
            cluster="nodes: 4, ranks_per_node: 8",
            strategies="fcdp",
            links="unshaped",
            timeout_s=200,
        )
        return ["run", str(matrix), "--no-wandb", "--resume", "--output", str(self.output / "run")]

    def start(self, steps: int, *script: str) -> subprocess.Popen[str]:
        """Give the command, or have a launch script give it."""
        path = os.pathsep.join([self.variables.get("PATH", ""), os.environ["PATH"]])
        usual = {"FCDP_RANKS_PER_NODE": "1", "VENV": str(Path(sys.executable).parent.parent)}
        words = [sys.executable, "-m", "experiments", *self.command(steps), "--cluster", "rented"]
        return subprocess.Popen(
            [*self._before, *([*script, " ".join(self.command(steps))] if script else words)],
            cwd=ROOT,
            env={**os.environ, **usual, **self.variables, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def steps(self) -> int:
        files = self.output.glob(f"run/cells/*/{PROGRESS}")
        return sum(file.read_bytes().count(b"\n") for file in files)

    def wait_until_it_trains(self) -> None:
        wait_until(lambda: self.steps() > 0, 200)

    def check_record(self) -> Measurement:
        """Check that the cell has trained on two nodes, and the kernel counted what crossed."""
        (record,) = self.records()
        assert (record.state, record.evidence) == ("ok", "measured"), record.error
        assert (record.cell.cluster.nodes, record.cell.cluster.ranks_per_node) == (2, 1)
        assert record.network["counted_interface"] == INTERFACE
        assert record.measurement.inter_node_bytes_per_step > 1000
        logs = self.output / "run/cells" / record.cell_id / "logs"
        assert {"node0.log", "node1.log", "rank0.log", "rank1.log"} <= set(os.listdir(logs))
        return record.measurement

    def records(self) -> list[Record]:
        file = self.output / "run/records.jsonl"
        return read_records(file) if file.exists() else []


def finish(process: subprocess.Popen[str], within_s: float = 280) -> str:
    """Return what the process printed; the caller checks its exit status."""
    try:
        return process.communicate(timeout=within_s)[0]
    finally:
        process.kill()


def check_lost(process: subprocess.Popen[str], run: Run, since: float) -> None:
    """Check that it ends within a minute, without a record of the cell that ran."""
    output = finish(process, _AT_MOST_S)
    assert time.monotonic() - since < _AT_MOST_S
    assert process.returncode == terminal.LOST, output
    assert "is lost" in output
    assert "go on with --resume" in output
    assert run.records() == []


def programs_of_ranks(network: Network) -> list[int]:
    """Pids of ranks, of their agents and of what started these, on any node."""
    pids = []
    for name in network.nodes:
        for pid in namespaces.processes(name):
            words = Path(f"/proc/{pid}/cmdline").read_bytes() if is_running(pid) else b""
            if b"experiments.clusters." in words or b"multiprocessing" in words:
                pids.append(pid)
    return pids
