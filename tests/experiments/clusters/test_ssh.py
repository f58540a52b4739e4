"""Rented nodes on real sshd, without a common file system."""

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from tests.experiments.clusters.engines import enter, sshd
from tests.experiments.clusters.lasting_cell import LastingCell
from tests.experiments.clusters.own_program import Training, agents, programs, ranks
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


@pytest.mark.timeout(3600)
def test_a_program_of_ones_own_outlives_its_nodes(
    network: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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

    kinds, draw = ["connection", "rank", "notice"], random.Random(0)
    exhaustive = request.config.getoption("--exhaustive")
    if exhaustive:
        kinds = draw.sample([*kinds, "agent"] * 3, 10)
    with sshd(network, tmp_path, hidden=tmp_path / "hidden") as client:
        started = start(client)
        training.goes_on()
        for kind in kinds:
            if kind == "connection":
                below = psutil.Process(started.pid).children(recursive=True)
                next(each for each in below if each.name() == "ssh").kill()
            elif kind == "notice":
                ends(started)
                started = start(client)
            else:
                draw.choice(agents()[1:] if kind == "agent" else ranks()).kill()
            training.check_that_it_goes_on(kind)
        ends(started)
    if exhaustive:
        training.check_losses()


@pytest.mark.timeout(3600)
def test_a_cell_outlives_its_nodes(
    network: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By ``launch/ssh.sh``; nobody gives the command again but after SIGTERM."""
    if not request.config.getoption("--exhaustive"):
        pytest.skip("trains for minutes: runs with --exhaustive")
    kinds = ["connection", "rank", "runner", "node", "notice"] * 2
    random.Random(1).shuffle(kinds)
    calm, cell = (LastingCell(tmp_path / name, network, len(kinds)) for name in ("calm", "cell"))
    (tmp_path / "hidden").mkdir()
    with sshd(network, tmp_path, hidden=tmp_path / "hidden") as client:

        def start(cell: LastingCell) -> subprocess.Popen[bytes]:
            path = f"{client}:{os.environ['PATH']}"
            script, hosts = str(ROOT / "launch/ssh.sh"), " ".join(network.addresses)
            with (tmp_path / "log.txt").open("ab") as log:
                return subprocess.Popen(
                    [*enter(network, 0), script, hosts, cell.command],
                    env={**os.environ, **cell.variables, "PATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )

        def disconnect() -> None:
            below = cell.runner().children(recursive=True)
            next(each for each in below if each.name() == "ssh").kill()

        def notice() -> None:
            nonlocal started
            started.terminate()
            started.wait(timeout=90)
            assert programs_of_ranks(network) == []
            started = start(cell)

        assert start(calm).wait(timeout=600) == 0
        started = start(cell)
        cell.check_ends(
            kinds,
            {
                "connection": disconnect,
                "rank": lambda: cell.ranks(1)[0].kill(),
                "runner": lambda: cell.runner().kill(),
                "node": lambda: cell.lose(1),
                "notice": notice,
            },
        )
        assert started.wait(timeout=600) == 0
    assert cell.measured().losses == calm.measured().losses
