"""Processes that end: what the others of their job then say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.fcdp.failures.failing_job import JOBS
from tests.fcdp.failures.made_up import SOON_S

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """Exit status and error output of three ranks, by job."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs = subprocess.Popen(
        [sys.executable, "-m", "tests.fcdp.failures.failing_job", folder],
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
