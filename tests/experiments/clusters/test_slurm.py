"""Rented nodes on a real Slurm."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from tests.experiments.clusters.engines import Slurm, require, slurm
from tests.experiments.clusters.own_program import Training, programs, ranks
from tests.experiments.clusters.two_nodes import (
    Run,
    check_lost,
    check_that_it_goes_on,
    programs_of_ranks,
)
from tests.experiments.waiting import wait_until

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture(scope="module")
def cluster(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require("slurmctld slurmd slurm-client munge", "slurmctld", "slurmd", "srun", "munged")
    with slurm(network, tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def run(cluster: Slurm, tmp_path: Path) -> Run:
    return Run(tmp_path, cluster.command(), cluster.variables | allocate(cluster))


def allocate(cluster: Slurm) -> dict[str, str]:
    """Slurm's variables of an allocation of both nodes."""
    cluster.wait_until_idle()
    cluster.call("salloc", "--no-shell", "--nodes=2", "--quiet")
    (job,) = cluster.call("squeue", "--noheader", "--states=R", "--format=%i").split()
    return {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n[0-1]"}


def test_two_cells_train_in_a_batch_job(cluster: Slurm, network: Network, tmp_path: Path) -> None:
    run = Run(tmp_path, [], {})
    cluster.wait_until_idle()
    log = tmp_path / "batch.log"
    job = cluster.call(
        *("sbatch", "--parsable", "--nodes=2", f"--output={log}"),
        f"--export=ALL,FCDP_RANKS_PER_NODE=1,VENV={Path(sys.executable).parent.parent}",
        *("launch/slurm.sbatch", " ".join(run.command(steps=2))),
    ).strip()
    # With --wait sbatch itself looks after 2, 10 and 42 seconds.
    assert cluster.wait_until_ended(job) == "COMPLETED", log.read_text()
    run.check_records()
    assert programs_of_ranks(network) == []


def test_scancel_is_a_lost_node(cluster: Slurm, run: Run, network: Network) -> None:
    started = run.start(steps=10**6)
    run.wait_until_it_trains()
    cluster.call("scancel", run.variables["SLURM_JOB_ID"])
    check_lost(started, run, time.monotonic())
    wait_until(lambda: programs_of_ranks(network) == [])
    run.variables |= allocate(cluster)
    check_that_it_goes_on(run)
    cluster.call("scancel", run.variables["SLURM_JOB_ID"])


def test_a_killed_slurmd_is_a_lost_node(cluster: Slurm, run: Run, network: Network) -> None:
    started = run.start(steps=10**6)
    run.wait_until_it_trains()
    killed = time.monotonic()
    cluster.slurmd[1].send_signal(signal.SIGKILL)
    cluster.slurmd[1].wait()
    check_lost(started, run, killed)
    # Nobody tells the node's ranks; they notice that the runner is silent.
    wait_until(lambda: programs_of_ranks(network) == [])
    cluster.slurmd[1] = cluster.start(1)
    run.variables |= allocate(cluster)
    check_that_it_goes_on(run)
    cluster.call("scancel", run.variables["SLURM_JOB_ID"])


def test_a_program_of_ones_own_goes_on_where_it_is_queued_again(
    cluster: Slurm, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By ``launch/train.sbatch``: after a notice before its time is up, and at ``requeue``."""
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

    kinds, draw = ["notice", "requeue"], random.Random(0)
    if request.config.getoption("--exhaustive"):
        kinds = draw.sample([*kinds, "rank"] * 4, 10)
    training.goes_on()
    for kind in kinds:
        if kind == "rank":
            draw.choice(ranks()).kill()
        else:
            notice = ("scancel", "--batch", "--signal=USR1")
            cluster.call(*(notice if kind == "notice" else ("scontrol", "requeue")), job)
            wait_until_queued()
        training.check_that_it_goes_on(kind)
    cluster.call("scancel", job)
    cluster.wait_until_ended(job)
    assert programs() == []
