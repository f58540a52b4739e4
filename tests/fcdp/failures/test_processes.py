"""Processes that end, and the errors of the others of their job.

Run as a program, this imports torch, and each rank is a fork of it that ends as a program of its
own does, with its error output in a file of the job's folder. All jobs run at the same time; the
exit statuses are printed, by job.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fcdp import failure
from tests.fcdp.failures import SOON_S

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
            with failures.exchanges:
                dist.all_reduce(torch.ones(3))


def free_ports(count: int) -> list[int]:
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


pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Exit status and error output of three ranks, by job."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = subprocess.Popen(
        [sys.executable, "-m", "tests.fcdp.failures.test_processes", folder],
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = jobs.communicate(timeout=4 * SOON_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(jobs.pid, signal.SIGKILL)  # the ranks are of its session
    return {
        job: [
            (status, (folder / f"{job}, rank {rank}").read_text())
            for rank, status in enumerate(statuses)
        ]
        for job, statuses in json.loads(output.splitlines()[-1]).items()
    }


@pytest.mark.parametrize("job", [job for job, (_, how) in JOBS.items() if how == "raises"])
def test_an_uncaught_error_is_in_the_messages_of_all_ranks(
    job: str, ended: dict[str, list[tuple[int, str]]]
) -> None:
    failing, _ = JOBS[job]
    for rank, (status, output) in enumerate(ended[job]):
        assert status == 1, output
        last = output.strip().splitlines()[-1].removeprefix(f"[rank{rank}]: ")
        if rank == failing:
            assert last == "ValueError: row 17 has no label"
        else:
            expected = f"rank {failing} failed: ValueError: row 17 has no label"
            assert last == f"fcdp.failure.RankFailed: {expected}"
            # The transport's error is its cause.
            assert "was the direct cause of the following exception" in output


@pytest.mark.parametrize("job", [job for job, (_, how) in JOBS.items() if how == "is killed"])
def test_a_killed_rank_ends_the_others(job: str, ended: dict[str, list[tuple[int, str]]]) -> None:
    failing, _ = JOBS[job]
    for rank, (status, output) in enumerate(ended[job]):
        if rank == failing:
            assert status == -signal.SIGKILL
        else:
            assert status == 1, output
            assert "fcdp.failure.RankFailed: rank" in output
            assert "no rank has reported an error: one was killed" in output
            assert ("rank 0 was lost?" in output) == (failing == 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
