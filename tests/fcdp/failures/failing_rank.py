"""One rank of a job in which one rank ends before its time: run by ``test_processes``.

``python -m tests.fcdp.failures.failing_rank RANK WORLD PORT FAILING {raises,is-killed}``
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fcdp import failure


def main(rank: int, world_size: int, port: int, failing: int, how: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
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


if __name__ == "__main__":
    rank, world_size, port, failing = map(int, sys.argv[1:5])
    main(rank, world_size, port, failing, sys.argv[5])
