"""Processes that end: what the others of their job then say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fcdp.failures.made_up import SOON_S

pytestmark = pytest.mark.ranks


def _run_job(failing: int, how: str, folder: Path) -> list[tuple[int, str]]:
    """Exit status and error output of three ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.fcdp.failures.failing_job"),
            *(str(port), str(failing), how, str(folder)),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=4 * SOON_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # the ranks are of its session
    statuses = json.loads(output.splitlines()[-1])
    return [(status, (folder / f"{rank}.err").read_text()) for rank, status in enumerate(statuses)]


@pytest.mark.parametrize("failing", [0, 2], ids=["serves-the-store", "another"])
def test_an_uncaught_error_is_in_the_messages_of_all_ranks(failing: int, tmp_path: Path) -> None:
    for rank, (status, output) in enumerate(_run_job(failing, "raises", tmp_path)):
        assert status == 1, output
        last = output.strip().splitlines()[-1].removeprefix(f"[rank{rank}]: ")
        if rank == failing:
            assert last == "ValueError: row 17 has no label"
        else:
            expected = f"rank {failing} failed: ValueError: row 17 has no label"
            assert last == f"fcdp.failure.RankFailed: {expected}"
            # The transport's error is its cause.
            assert "was the direct cause of the following exception" in output


@pytest.mark.parametrize("failing", [0, 2], ids=["serves-the-store", "another"])
def test_a_killed_rank_ends_the_others(failing: int, tmp_path: Path) -> None:
    for rank, (status, output) in enumerate(_run_job(failing, "is-killed", tmp_path)):
        if rank == failing:
            assert status == -signal.SIGKILL
        else:
            assert status == 1, output
            assert "fcdp.failure.RankFailed: rank" in output
            assert "no rank has reported an error: one was killed" in output
            assert ("rank 0 was lost?" in output) == (failing == 0)
