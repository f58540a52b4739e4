"""The agent of a node beside torch's."""

from __future__ import annotations

import os
from multiprocessing import get_context

from torch.multiprocessing import start_processes

from experiments.clusters import agent
from tests.experiments.waiting import wait_until


def _fail_or_wait(index: int, ended: object) -> None:
    if index == 0:
        os._exit(3)
    ended.wait()  # type: ignore[attr-defined]


def test_a_rank_that_failed_between_two_looks_has_nobody_ended() -> None:
    """It happened once in a hundred launches whose failing rank took its time to say so."""
    ended = get_context("fork").Event()
    context = start_processes(
        _fail_or_wait, (ended,), nprocs=2, join=False, daemon=False, start_method="fork"
    )
    assert context is not None
    agent.leave_failures(context)
    failed, waits = context.processes
    wait_until(lambda: agent._exit_code(failed.pid) == 3)

    assert not context.join(-1)
    assert waits.is_alive()

    ended.set()
    wait_until(lambda: agent._exit_code(waits.pid) == 0)
    assert not context.join(-1)  # for the one that failed
    assert waits.exitcode == 0
    failed.join()
