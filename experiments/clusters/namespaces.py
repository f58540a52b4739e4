"""Network namespaces: how they are made, entered, and removed with whatever runs inside."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import psutil
from pyroute2 import netns

from experiments.clusters import lifetimes
from experiments.clusters.interface import ClusterError

_Value = TypeVar("_Value")


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


def remove_stale() -> None:
    """Remove the namespaces whose owner no longer runs."""
    for name in filter(lifetimes.is_orphan, netns.listnetns()):
        remove(name)


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
    pids = []
    for pid in psutil.pids():
        with suppress(OSError):  # ended meanwhile, a zombie, or somebody else's
            if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), inside):
                pids.append(pid)
    return pids


def end_processes(name: str, spare: frozenset[int] = frozenset()) -> None:
    """Kill the processes inside a namespace, but those in ``spare``, and wait until they are gone.

    Only our own processes can be there: nobody else knows the namespace. Raises ``ClusterError``
    if some are left (stuck inside the kernel).
    """
    if left := lifetimes.end(lambda: set(processes(name)) - spare):
        raise ClusterError(f"processes {sorted(left)} in {name} do not end after SIGKILL")
