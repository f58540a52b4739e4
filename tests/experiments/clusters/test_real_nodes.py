"""Matrices on real sshd and real Slurm: two nodes, which are namespaces of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments import records
from experiments.clusters import namespaces
from experiments.clusters.network import INTERFACE, Network
from experiments.provenance import ROOT
from experiments.records import Record
from tests.experiments.clusters.engines import Slurm, enter, program, require, slurm, sshd
from tests.experiments.waiting import is_running, wait_until, wait_until_ended

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("privileged")]

#: Within which a lost node must have ended the run.
_AT_MOST_S = 60

_MATRIX = """\
name: tiny
description: two cells
cluster: {nodes: 4, ranks_per_node: 8}
models: [{name: tiny, family: gpt2, layers: 1, width: 16, heads: 1}]
axes:
  strategy: [fsdp2, fcdp]
workload:
  inter_bandwidth: unshaped
  model: tiny
  tuning: full
  sequence_length: 16
  micro_batch: 1
  accumulation: 1
  dtype: float32
  lora_rank: 4
  learning_rate: 0.001
  warmup_steps: 1
  steps: STEPS
  timeout_s: 200
"""


class Run:
    """One run of the matrix, by the command line on the first node."""

    def __init__(self, folder: Path, before: list[str], variables: dict[str, str]) -> None:
        self.folder = folder
        self.output = folder / "hidden"
        self.output.mkdir(exist_ok=True)
        self._before = before
        self._variables = variables

    def command(self, steps: int) -> list[str]:
        """What follows ``python -m experiments``. The id of a cell has its number of steps."""
        matrix = self.folder / "tiny.yaml"
        matrix.write_text(_MATRIX.replace("STEPS", str(steps)))
        return ["run", str(matrix), "--no-wandb", "--resume", "--output", str(self.output / "run")]

    def start(self, steps: int = 2) -> subprocess.Popen[str]:
        path = os.pathsep.join([self._variables.get("PATH", ""), os.environ["PATH"]])
        return subprocess.Popen(
            [
                *self._before,
                *(sys.executable, "-m", "experiments", *self.command(steps)),
                *("--cluster", "rented"),
            ],
            cwd=ROOT,
            env={**os.environ, "FCDP_RANKS_PER_NODE": "1", **self._variables, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_until_it_trains(self) -> None:
        wait_until(lambda: any(self.output.glob("run/cells/*/progress.jsonl")), 200)

    def check_records(self) -> None:
        """Both cells have trained on two nodes, and the kernel has counted what crossed."""
        found = self.records()
        assert [(each.cell.strategy, each.state, each.evidence) for each in found] == [
            ("fsdp2", "ok", "measured"),
            ("fcdp", "ok", "measured"),
        ], [each.error for each in found]
        for each in found:
            assert (each.cell.cluster.nodes, each.cell.cluster.ranks_per_node) == (2, 1)
            assert each.network["counted_interface"] == INTERFACE
            assert each.measurement is not None
            assert each.measurement.inter_node_bytes_per_step > 1000
            logs = self.output / "run/cells" / each.cell_id / "logs"
            assert {"node0.log", "node1.log", "rank0.log", "rank1.log"} <= set(os.listdir(logs))

    def records(self) -> list[Record]:
        file = self.output / "run/records.jsonl"
        return records.read(file) if file.exists() else []


def finish(process: subprocess.Popen[str], within_s: float = 280) -> str:
    """What the process printed; its exit status is checked by who calls."""
    try:
        return process.communicate(timeout=within_s)[0]
    finally:
        process.kill()


def check_lost(process: subprocess.Popen[str], run: Run, since: float) -> None:
    """It has ended within a minute, without a record of the cell that ran."""
    said = finish(process, _AT_MOST_S)
    assert time.monotonic() - since < _AT_MOST_S
    assert process.returncode == 2, said
    assert "is lost" in said
    assert "go on with --resume" in said
    assert run.records() == []


def check_that_it_goes_on(run: Run) -> None:
    """The same command runs what has no record."""
    again = run.start()
    said = finish(again)
    assert again.returncode == 0, said
    run.check_records()


def programs_of_ranks(network: Network) -> list[int]:
    """Pids of ranks, of torchrun and of what started it, on any node."""
    found = []
    for name in network.nodes:
        for pid in namespaces.processes(name):
            words = Path(f"/proc/{pid}/cmdline").read_bytes() if is_running(pid) else b""
            if b"experiments.clusters." in words:
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def network(privileged: None) -> Iterator[Network]:
    with Network(2) as built:
        yield built


class TestSsh:
    @pytest.fixture
    def run(self, network: Network, tmp_path: Path) -> Iterator[Run]:
        require("openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")
        run = Run(tmp_path, enter(network, 0), {"FCDP_HOSTS": " ".join(network.addresses)})
        with sshd(network, tmp_path, hidden=run.output) as client:
            run._variables["PATH"] = str(client)
            yield run

    def test_two_cells_train_without_a_common_file_system(self, run: Run, network: Network) -> None:
        started = run.start()
        said = finish(started)
        assert started.returncode == 0, said
        run.check_records()
        assert programs_of_ranks(network) == []

    def test_a_killed_ssh_is_a_lost_node(self, run: Run, network: Network) -> None:
        started = run.start(steps=10**6)
        run.wait_until_it_trains()
        (client,) = [
            each
            for each in psutil.Process(started.pid).children(recursive=True)
            if each.name() == "ssh"
        ]
        client.kill()
        check_lost(started, run, time.monotonic())
        wait_until(lambda: programs_of_ranks(network) == [])
        check_that_it_goes_on(run)

    def test_nothing_outlives_a_killed_runner(self, run: Run, network: Network) -> None:
        started = run.start(steps=10**6)
        run.wait_until_it_trains()
        pids = programs_of_ranks(network)
        started.kill()
        finish(started)
        # The program, torchrun and a rank on each node.
        assert len(pids) >= 6
        wait_until_ended(pids)


class TestSlurm:
    @pytest.fixture(scope="class")
    def cluster(
        self, network: Network, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Slurm]:
        require("slurmctld slurmd slurm-client munge", "slurmctld", "slurmd", "srun", "munged")
        with slurm(network, tmp_path_factory.mktemp("slurm")) as started:
            yield started

    @pytest.fixture
    def run(self, cluster: Slurm, tmp_path: Path) -> Run:
        return Run(tmp_path, cluster.command(), cluster.variables | self.allocate(cluster))

    @staticmethod
    def allocate(cluster: Slurm) -> dict[str, str]:
        """Slurm's variables of an allocation of both nodes."""
        wait_until(cluster.idle)
        cluster.call("salloc", "--no-shell", "--nodes=2", "--quiet")
        (job,) = cluster.call("squeue", "--noheader", "--states=R", "--format=%i").split()
        return {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[0-1]"}

    def test_two_cells_train_in_a_batch_job(
        self, cluster: Slurm, network: Network, tmp_path: Path
    ) -> None:
        run = Run(tmp_path, [], {})
        wait_until(cluster.idle)
        log = tmp_path / "batch.log"
        cluster.call(
            *("sbatch", "--wait", "--nodes=2", f"--output={log}"),
            f"--export=ALL,FCDP_RANKS_PER_NODE=1,VENV={Path(sys.executable).parent.parent}",
            *("launch/slurm.sbatch", " ".join(run.command(steps=2))),
        )
        run.check_records()
        assert programs_of_ranks(network) == []

    def test_scancel_is_a_lost_node(self, cluster: Slurm, run: Run, network: Network) -> None:
        started = run.start(steps=10**6)
        run.wait_until_it_trains()
        cluster.call("scancel", run._variables["SLURM_JOB_ID"])
        check_lost(started, run, time.monotonic())
        wait_until(lambda: programs_of_ranks(network) == [])
        run._variables |= self.allocate(cluster)
        check_that_it_goes_on(run)
        cluster.call("scancel", run._variables["SLURM_JOB_ID"])

    def test_a_killed_slurmd_is_a_lost_node(
        self, cluster: Slurm, run: Run, network: Network
    ) -> None:
        started = run.start(steps=10**6)
        run.wait_until_it_trains()
        killed = time.monotonic()
        cluster.slurmd[1].send_signal(signal.SIGKILL)
        cluster.slurmd[1].wait()
        check_lost(started, run, killed)
        # Nobody tells the node's ranks; they notice that the runner is silent.
        wait_until(lambda: programs_of_ranks(network) == [])
        cluster.slurmd[1] = cluster.start(1)
        run._variables |= self.allocate(cluster)
        check_that_it_goes_on(run)
        cluster.call("scancel", run._variables["SLURM_JOB_ID"])


def test_a_missing_engine_is_the_reason_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "there", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    require("package", "there")
    with pytest.raises(pytest.skip.Exception, match="no not-there: apt-get install package"):
        require("package", "there", "not-there")
