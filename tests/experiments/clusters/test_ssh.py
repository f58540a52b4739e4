"""Rented nodes on real sshd, without a common file system."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from tests.experiments.clusters.engines import enter, sshd
from tests.experiments.clusters.own_program import Training, programs, ranks
from tests.experiments.clusters.two_nodes import Run, check_lost, finish, programs_of_ranks
from tests.experiments.waiting import wait_until

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture
def run(network: Network, tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path, enter(network, 0), {"FCDP_HOSTS": " ".join(network.addresses)})
    with sshd(network, tmp_path, hidden=run.output) as client:
        run.variables["PATH"] = str(client)
        yield run


def test_a_cell_trains_without_a_common_file_system_after_a_killed_ssh_is_a_lost_node(
    run: Run, network: Network
) -> None:
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
    again = run.start(2, str(ROOT / "launch/ssh.sh"), run.variables["FCDP_HOSTS"])
    output = finish(again)
    assert again.returncode == 0, output
    run.check_record()
    assert programs_of_ranks(network) == []


def test_a_program_of_ones_own_outlives_its_nodes(network: Network, tmp_path: Path) -> None:
    """By ``launch/train-ssh.sh``: a lost connection, ranks that are killed, and SIGTERM."""
    training = Training(tmp_path)
    (tmp_path / "hidden").mkdir()

    def start(client: Path) -> subprocess.Popen[bytes]:
        with training.log.open("ab") as output:
            return subprocess.Popen(
                [
                    *(*enter(network, 0), str(ROOT / "launch/train-ssh.sh")),
                    *("\n".join(network.addresses), *training.words),
                ],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PATH": f"{client}:{os.environ['PATH']}",
                    "TORCHRUN": str(training.torchrun),
                    "FCDP_RANKS_PER_NODE": "1",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def ends(started: subprocess.Popen[bytes]) -> None:
        """Tell all ranks to save and to end; nothing is left."""
        started.terminate()
        started.wait(timeout=90)
        wait_until(lambda: programs() == [], 60)

    with sshd(network, tmp_path, hidden=tmp_path / "hidden") as client:
        started = start(client)
        training.goes_on()
        below = psutil.Process(started.pid).children(recursive=True)
        next(each for each in below if each.name() == "ssh").kill()
        training.check_that_it_goes_on("connection")
        ranks()[-1].kill()
        training.check_that_it_goes_on("rank")
        ends(started)
        started = start(client)
        training.check_that_it_goes_on("notice")
        ends(started)
