"""launch/docker.sh with real Docker engines: two containers are the nodes of one job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.clusters.emulated import Network
from experiments.records.provenance import ROOT
from tests.experiments.clusters.engines import enter, require, sshd
from tests.experiments.clusters.two_nodes import Run, finish
from tests.experiments.waiting import wait_until
from tests.launch.docker_engine import OPTIONS, Engine, docker

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture(scope="module")
def network(privileged: None) -> Iterator[Network]:
    with Network(2) as built:
        yield built


@pytest.fixture(scope="module")
def engines(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    require("docker.io", "docker", "dockerd", "containerd", "runc")
    with docker(network, tmp_path_factory.mktemp("docker")) as started:
        yield started


@pytest.fixture
def run(network: Network, engines: list[Engine], tmp_path: Path) -> Iterator[Containers]:
    require("openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")
    keys, hidden = tmp_path / "keys", tmp_path / "hidden"
    keys.mkdir()
    hidden.mkdir()
    with sshd(network, keys, hidden, **engines[1].variables) as client:
        yield Containers(tmp_path, network, engines, client)


class Containers:
    """A run of the tests' matrix by launch/docker.sh on the first node."""

    def __init__(self, folder: Path, network: Network, engines: list[Engine], client: Path) -> None:
        self.engines = engines
        self._checkout = folder / "checkout"
        (self._checkout / "runs").mkdir(parents=True)
        (folder / "home/.ssh").mkdir(parents=True)
        shutil.copytree(ROOT / "launch", self._checkout / "launch")
        self.run = Run(self._checkout / "runs", enter(network, 0), {})
        self._hosts = " ".join(network.addresses)
        keys = client.parent
        self._variables = {
            **engines[0].variables,
            "HOME": str(folder / "home"),
            "FCDP_GPUS": "none",
            "FCDP_RANKS_PER_NODE": "1",
            "FCDP_DOCKER_OPTIONS": f"{OPTIONS} --volume {keys}:{keys} "
            f"--env PATH={client}:{os.environ['PATH']}",
        }

    def start(self, steps: int, *more: str) -> subprocess.Popen[str]:
        there = " ".join(self.run.command(steps)).replace(str(self._checkout), "/opt/fcdp")
        return subprocess.Popen(
            [self._checkout / "launch/docker.sh", self._hosts, there, *more],
            env={**os.environ, **self._variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check_nothing_runs(self) -> None:
        wait_until(lambda: not any(engine.containers() for engine in self.engines), every_s=0.3)


def test_two_containers_train(run: Containers) -> None:
    started = run.start(steps=2)
    said = finish(started)
    assert started.returncode == 0, said
    run.run.check_record()
    run.check_nothing_runs()


def test_a_signal_ends_the_run_and_all_containers(run: Containers) -> None:
    started = run.start(10**6, "preflight")
    run.run.wait_until_it_trains()
    assert [len(engine.containers()) for engine in run.engines] == [1, 1]
    started.send_signal(signal.SIGTERM)
    said = finish(started, 60)
    assert started.returncode == 130, said
    assert "interrupted: the cluster is torn down" in said
    assert "between nodes" not in said
    run.check_nothing_runs()
