"""Rented nodes on real sshd, without a common file system."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.clusters.emulated import INTERFACE, Network
from experiments.records.provenance import ROOT
from tests.examples.test_train import make_model
from tests.experiments.clusters.engines import enter, program, require, sshd
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


def test_a_program_of_ones_own_outlives_its_nodes(network: Network, tmp_path: Path) -> None:
    """By ``launch/train-ssh.sh``: a lost connection, ranks that are killed, and SIGTERM."""
    require("openssh-server openssh-client", "sshd", "ssh", "ssh-keygen")
    make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_bytes(Path(argparse.__file__).read_bytes()[:20_000])
    torchrun = tmp_path / "torchrun"
    program(
        torchrun,
        f"export PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n"
        f'exec {sys.executable} -m torch.distributed.run "$@"',
    )
    (tmp_path / "hidden").mkdir()
    log, steps = tmp_path / "log.txt", tmp_path / "out/log.jsonl"
    words = [*("--model", "model", "--data", "text.txt", "--output", "out", "--save-every", "50")]
    words += ["--sequence-length", "32", "--global-batch", "6", "--steps", "1000000"]

    def start(client: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [
                    *(*enter(network, 0), str(ROOT / "launch/train-ssh.sh")),
                    *(" ".join(network.addresses), str(ROOT / "examples/train.py"), *words),
                ],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PATH": f"{client}:{os.environ['PATH']}",
                    "TORCHRUN": str(torchrun),
                    "FCDP_RANKS_PER_NODE": "1",
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in steps.read_text().splitlines()]

    def goes_on(ranks: int) -> None:
        """Wait for twenty more steps of so many ranks."""
        done = len(lines()) if steps.exists() else 0
        wait_until(
            lambda: (
                steps.exists()
                and len(more := lines()[done:]) > 20
                and all(line["ranks"] == ranks for line in more[-20:])
            ),
            150,
        )

    def begun() -> list[int]:
        return [*map(int, re.findall(r"from step (\d+) of", log.read_text()))]

    with sshd(network, tmp_path, hidden=tmp_path / "hidden") as client:
        started = start(client)
        goes_on(2)
        (connection,) = [
            each
            for each in psutil.Process(started.pid).children(recursive=True)
            if each.name() == "ssh"
        ]
        connection.kill()
        goes_on(2)  # it is asked again
        rank = next(pid for pid in programs(str(ROOT / "examples/train.py")) if is_rank(pid))
        rank.kill()
        goes_on(2)
        started.terminate()
        started.wait(timeout=90)
        last = lines()[-1]["step"]
        wait_until(lambda: programs(str(ROOT / "examples/train.py")) == [], 60)
        again = start(client)
        goes_on(2)
        assert begun()[-1] == last + 1, "a notice loses no step"
        again.terminate()
        again.wait(timeout=90)
        wait_until(lambda: programs(str(ROOT / "examples/train.py")) == [], 60)


def programs(word: str) -> list[psutil.Process]:
    """Processes of whose command line the word is a part."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if word in (each.info["cmdline"] or []) and each.status() != psutil.STATUS_ZOMBIE
    ]


def is_rank(process: psutil.Process) -> bool:
    return "torch.distributed.run" not in process.cmdline() and process.name() != "bash"
