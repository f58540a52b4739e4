"""Network namespaces that say by their name which process owns them.

A cluster's namespaces outlive a parent that was killed with SIGKILL. Their names carry the
parent's pid, start time and pid namespace, so that the next start can tell the ones nobody owns
any more from those of a parent that still runs.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pyroute2 import netns

from experiments.clusters.interface import ClusterError

_Value = TypeVar("_Value")

_NAME = re.compile(r"fcdp-(?P<scope>\d+)-(?P<pid>\d+)-(?P<started>\d+)-\d+-(switch|node\d+)")
_clusters = itertools.count()


def started_at(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses and may itself contain any character.
    return int(text.rpartition(")")[2].split()[19])


def _pid_scope() -> int:
    """Inode of this process's pid namespace: pids of another one say nothing about ours."""
    return os.stat("/proc/self/ns/pid").st_ino


def new_prefix() -> str:
    """A name prefix for one cluster of this process: no other cluster, past or present, has it."""
    return f"fcdp-{_pid_scope()}-{os.getpid()}-{started_at(os.getpid())}-{next(_clusters)}"


def create(name: str) -> None:
    """Create a network namespace whose loopback is still down.

    Raises ``ClusterError`` if the kernel refuses.
    """
    try:
        netns.create(name)
    except OSError as error:
        raise ClusterError(f"cannot create the network namespace {name}: {error}") from error


def remove(name: str) -> None:
    """End every process inside a namespace of ours and remove it; no error if it is gone."""
    end_processes(name)
    # umount fails on a name whose creator died before it mounted anything; unlink still works.
    with suppress(FileNotFoundError):
        netns.remove(name)


def remove_stale() -> list[str]:
    """Remove the namespaces whose owner no longer runs; return their names."""
    stale = [name for name in netns.listnetns() if _is_stale(name)]
    for name in stale:
        remove(name)
    return stale


def _is_stale(name: str) -> bool:
    match = _NAME.fullmatch(name)
    if match is None or int(match["scope"]) != _pid_scope():
        return False
    # Another start time: the pid belongs to another process by now.
    return started_at(int(match["pid"])) != int(match["started"])


def call_in(name: str, function: Callable[[], _Value]) -> _Value:
    """Call a function inside a namespace and return its value.

    A namespace belongs to a thread: the call runs in one that ends afterwards, so the caller
    never leaves its own. Sockets that the function opens stay in the namespace.
    """

    def entered() -> _Value:
        netns.setns(name, flags=0)
        return function()

    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(entered).result()


def processes(name: str) -> list[int]:
    """Pids of the processes (not zombies) whose main thread is inside a namespace."""
    try:
        inside = os.stat(f"{netns.NETNS_RUN_DIR}/{name}")
    except FileNotFoundError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError):  # ended meanwhile, a zombie, or somebody else's
            if os.path.samestat(os.stat(f"/proc/{entry}/ns/net"), inside):
                found.append(int(entry))
    return found


def end_processes(name: str, spare: frozenset[int] = frozenset(), within_s: float = 10.0) -> None:
    """Kill the processes inside a namespace, but those in ``spare``, and wait until they are gone.

    Only our own processes can be there: nobody else knows the namespace. Raises ``ClusterError``
    if some are left after ``within_s`` seconds (stuck inside the kernel).
    """
    deadline = time.monotonic() + within_s
    while left := set(processes(name)) - spare:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {sorted(left)} in {name} do not end after SIGKILL")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
