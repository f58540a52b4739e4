"""Rented nodes on a real Slurm."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.clusters import namespaces
from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from tests.experiments.clusters.engines import Slurm, end, require, slurm
from tests.experiments.clusters.own_program import Training, programs
from tests.experiments.clusters.two_nodes import Run, check_lost, programs_of_ranks
from tests.experiments.waiting import wait_until

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require("slurmctld slurmd slurm-client munge", "slurmctld", "slurmd", "srun", "munged")
    with slurm(network, tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def run(cluster: Slurm, tmp_path: Path) -> Run:
    """A run in an allocation of both nodes, by Slurm's variables."""
    cluster.wait_until_idle()
    cluster.call("salloc", "--no-shell", "--nodes=2", "--quiet")
    (job,) = cluster.call("squeue", "--noheader", "--states=R", "--format=%i").split()
    allocation = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[0-1]"}
    return Run(tmp_path, cluster.command(), cluster.variables | allocation)


def test_scancel_is_a_lost_node(cluster: Slurm, run: Run, network: Network) -> None:
    started = run.start(steps=10**6)
    run.wait_until_it_trains()
    cluster.call("scancel", run.variables["SLURM_JOB_ID"])
    check_lost(started, run, time.monotonic())
    wait_until(lambda: programs_of_ranks(network) == [])


def test_a_killed_slurmd_is_a_lost_node_and_a_batch_job_goes_on_where_it_is_queued_again(
    cluster: Slurm, run: Run, network: Network
) -> None:
    """By ``launch/slurm.sbatch``, after a notice before its time is up."""
    started = run.start(steps=10**6)
    run.wait_until_it_trains()
    killed = time.monotonic()
    end(cluster.slurmd[1])
    check_lost(started, run, killed)
    # Nobody tells the node's ranks; they notice that the runner is silent.
    wait_until(lambda: programs_of_ranks(network) == [])
    cluster.slurmd[1] = cluster.start(1)
    cluster.wait_until_idle()
    log, lost = run.folder / "batch.log", run.steps()
    job = cluster.call(
        *("sbatch", "--parsable", "--nodes=2", f"--output={log}"),
        f"--export=ALL,FCDP_RANKS_PER_NODE=1,VENV={Path(sys.executable).parent.parent}",
        *("launch/slurm.sbatch", " ".join([*run.command(150), "--set", "checkpoint_every=10"])),
    ).strip()
    wait_until(lambda: run.steps() > lost + 10, 200)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    # With --wait sbatch itself looks after 2, 10 and 42 seconds.
    assert cluster.wait_until_ended(job) == "COMPLETED", log.read_text()
    assert run.check_record().resumed_at
    wait_until(lambda: programs_of_ranks(network) == [])


def test_a_program_of_ones_own_goes_on_where_it_is_queued_again(
    cluster: Slurm, network: Network, tmp_path: Path
) -> None:
    """By ``launch/train.sbatch``: after a notice before its time is up, and without a node."""
    training = Training(tmp_path)
    cluster.wait_until_idle()
    job = cluster.call(
        *("sbatch", "--parsable", "--nodes=2", f"--output={training.log}"),
        f"--export=ALL,FCDP_RANKS_PER_NODE=1,TORCHRUN={training.torchrun},"
        f"GLOO_SOCKET_IFNAME={INTERFACE}",
        *(str(ROOT / "launch/train.sbatch"), *training.words),
    ).strip()

    def wait_until_queued() -> None:
        wait_until(lambda: "PENDING" in cluster.call("squeue", f"--jobs={job}", "--format=%T"), 90)

    training.goes_on()
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait_until_queued()
    training.check_that_it_goes_on("notice")
    end(cluster.slurmd[1])
    for pid in namespaces.processes(network.nodes[1]):  # it goes dark, as far as processes can
        os.kill(pid, signal.SIGKILL)
    training.check_that_it_goes_on("a node fewer", ranks=1)
    cluster.slurmd[1] = cluster.start(1)
    cluster.call("scontrol", "requeue", job)
    wait_until_queued()
    training.check_that_it_goes_on("node")
    cluster.call("scancel", job)
    cluster.wait_until_ended(job)
    # Slurm says that a job has ended before each of its nodes has ended its programs.
    wait_until(lambda: programs() == [])
