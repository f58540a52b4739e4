"""Jobs of three ranks, one of which ends before its time: run by ``test_processes``.

``python -m tests.fcdp.failures.failing_job FOLDER``

This process imports torch, and each rank is a fork of it that ends as a program of its own does,
with its error output in a file of the job's folder. All jobs run at the same time; the exit
statuses are printed, by job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fcdp import failure

WORLD_SIZE = 3
#: The rank that fails, and how. Rank 0 serves the store.
JOBS = {f"{failing} {how}": (failing, how) for failing in (0, 2) for how in ("raises", "is killed")}


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
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("row 17 has no label")
        for _ in range(2):
            with failures.waiting():
                dist.all_reduce(torch.ones(3))


def free_ports(count: int) -> list[int]:
    """As many different ones."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def main(folder: Path) -> None:
    """Start the ranks and wait for them; returns in each rank, once it has trained."""
    pids: dict[str, list[int]] = {job: [] for job in JOBS}
    for (job, (failing, how)), port in zip(JOBS.items(), free_ports(len(JOBS)), strict=True):
        for rank in range(WORLD_SIZE):
            if (pid := os.fork()) == 0:
                with (folder / f"{job}, rank {rank}").open("wb") as errors:
                    os.dup2(errors.fileno(), sys.stderr.fileno())
                train(rank, port, failing, how)
                return
            pids[job].append(pid)
    statuses = {
        job: [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in of_job]
        for job, of_job in pids.items()
    }
    print(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
