"""Waiting for what other processes do, in bounded time."""

import time
from collections.abc import Callable, Sequence

import psutil


def wait_until(condition: Callable[[], bool], within_s: float = 60, every_s: float = 0.02) -> None:
    """Look at the condition until it holds; less often where looking takes a command."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(every_s)


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(pids: Sequence[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))
