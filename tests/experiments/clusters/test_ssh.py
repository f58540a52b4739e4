"""Rented nodes on real sshd, without a common file system."""

from __future__ import annotations

import argparse
import json
import os
import random
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

PROGRAM = str(ROOT / "examples/train.py")

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


def test_a_program_of_ones_own_outlives_its_nodes(
    network: Network, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
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
                    *(" ".join(network.addresses), PROGRAM, *words),
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

    def resumed() -> list[int]:
        return [*map(int, re.findall(r"from step (\d+) of", log.read_text()))]

    def ends(started: subprocess.Popen[bytes]) -> None:
        """Tell all ranks to save and to end; nothing is left."""
        started.terminate()
        started.wait(timeout=90)
        wait_until(lambda: programs(PROGRAM) == [], 60)

    kinds, draw = ["connection", "rank", "notice"], random.Random(0)
    if request.config.getoption("--exhaustive"):
        kinds = draw.sample([*kinds, "agent"] * 3, 10)
    with sshd(network, tmp_path, hidden=tmp_path / "hidden") as client:
        started = start(client)
        goes_on(2)
        for kind in kinds:
            begun = time.monotonic()
            if kind == "connection":
                below = psutil.Process(started.pid).children(recursive=True)
                next(each for each in below if each.name() == "ssh").kill()
            elif kind == "notice":
                ends(started)
            else:
                agents = [each for each in programs(PROGRAM) if is_agent(each)]
                ranks = [each for each in programs(PROGRAM) if not is_agent(each)]
                draw.choice(agents[1:] if kind == "agent" else ranks).kill()
            last = lines()[-1]["step"]
            if kind == "notice":
                started = start(client)
            goes_on(2)
            lost = last + 1 - resumed()[-1]
            print(f"{kind}: twenty steps on after {time.monotonic() - begun:.1f} s, {lost} lost")
            assert lost <= 60, "an interval, and what was done before it was noticed"
            assert kind != "notice" or lost == 0
        ends(started)


def programs(word: str) -> list[psutil.Process]:
    """Processes of whose command line the word is a part."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if word in (each.info["cmdline"] or []) and each.status() != psutil.STATUS_ZOMBIE
    ]


def is_agent(process: psutil.Process) -> bool:
    """Whether a process is torchrun, and no rank of its."""
    return "torch.distributed.run" in process.cmdline()
