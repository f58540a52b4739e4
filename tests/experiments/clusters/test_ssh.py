"""Rented nodes on real sshd, without a common file system."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from experiments.clusters.emulated import Network
from tests.experiments.clusters.engines import enter, require, sshd
from tests.experiments.clusters.two_nodes import (
    Run,
    check_lost,
    check_that_it_goes_on,
    finish,
    programs_of_ranks,
)
from tests.experiments.waiting import wait_until

pytestmark = pytest.mark.usefixtures("privileged")


@pytest.fixture
def run(network: Network, tmp_path: Path) -> Iterator[Run]:
    require("openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")
    run = Run(tmp_path, enter(network, 0), {"FCDP_HOSTS": " ".join(network.addresses)})
    with sshd(network, tmp_path, hidden=run.output) as client:
        run.variables["PATH"] = str(client)
        yield run


def test_two_cells_train_without_a_common_file_system(run: Run, network: Network) -> None:
    started = run.start()
    said = finish(started)
    assert started.returncode == 0, said
    run.check_records()
    assert programs_of_ranks(network) == []


def test_a_killed_ssh_is_a_lost_node(run: Run, network: Network) -> None:
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
