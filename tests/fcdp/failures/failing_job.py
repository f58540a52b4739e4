"""A job of three ranks, one of which ends before its time: run by ``test_processes``.

``python -m tests.fcdp.failures.failing_job PORT FAILING {raises,is-killed} FOLDER``

This process imports torch, and each rank is a fork of it that ends as a program of its own does,
with its error output in a file of the folder. The exit statuses are printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fcdp import failure

WORLD_SIZE = 3


def train(rank: int, port: int, failing: int, how: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=100),
    )
    group = dist.group.WORLD
    assert group is not None
    failures = failure.Failures("job", [group])
    for step in range(4):
        failures.begins()
        if rank == failing and step == 2:
            if how == "is-killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("row 17 has no label")
        for _ in range(2):
            with failures.waiting():
                dist.all_reduce(torch.ones(3))


def main(port: int, failing: int, how: str, folder: Path) -> None:
    """Start the ranks and wait for them; returns in each rank, once it has trained."""
    pids = []
    for rank in range(WORLD_SIZE):
        if (pid := os.fork()) == 0:
            with (folder / f"{rank}.err").open("wb") as errors:
                os.dup2(errors.fileno(), sys.stderr.fileno())
            train(rank, port, failing, how)
            return
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
