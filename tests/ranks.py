"""Processes that tests share: one pool of ranks a world size, made at first use.

Starting ranks costs seconds and running a collective milliseconds, so a test sends a function to
ranks that already exist. A pool whose ranks failed or hung is ended and made anew.
"""

import functools
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from experiments.commands.kinds import PRELOADED

# Imported here, in the fork server, once for all ranks: those of pools, and those of clusters,
# each cell of which would otherwise import what is missing.
_PRELOAD = [
    *PRELOADED,
    "torch.distributed.fsdp",
    "pytest",
    "hypothesis",
    "fcdp",
    "tests.ranks",
    "experiments.worker.worker",
    "experiments.clusters.preload",  # so that clusters made later can use this fork server
]
#: Seconds that the others have after a rank failed: they may be about to fail alike.
_GRACE_S = 10
#: ``scripts/mutants`` forks pytest from what has imported all this, and pytest forks its ranks.
_FORKED = "FCDP_TESTS_FORK" in os.environ
_context = multiprocessing.get_context("fork" if _FORKED else "forkserver")
_context.set_forkserver_preload(_PRELOAD)


def start_fork_server() -> None:
    """Start the fork server of pools and clusters, with all that they import, unless it runs.

    A cluster that started it would have it import no more than its own ranks need. OpenMP reads
    its number of threads when torch is imported: one, as in a cluster's own fork server.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()


#: Makes a process a rank, by its number, the world size, and the file of the rendezvous.
Join = Callable[[int, int, Path], None]


class RankFailure(AssertionError):
    """An error that a rank raised, with its traceback."""


class RankPool:
    """``world_size`` processes that form one gloo group on loopback, or ``join`` otherwise."""

    def __init__(self, world_size: int, join: Join | None = None) -> None:
        if not _FORKED:
            start_fork_server()
        self._store = tempfile.TemporaryDirectory()
        self._ranks: list[tuple[Any, Connection]] = []
        #: The most process groups that a rank is in, and that it helped to make, in the last call.
        self._groups = (0, 0)
        for rank in range(world_size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(join or _join, there, rank, world_size, Path(self._store.name) / "store"),
                daemon=True,
            )
            process.start()
            there.close()
            self._ranks.append((process, here))

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 400) -> list[Any]:
        """Call ``function(*args)`` on every rank; return the results in rank order.

        Once a rank has failed, others that wait for it have little time left.
        """
        for _, pipe in self._ranks:
            pipe.send((function, args, self._groups))
        self._groups = (0, 0)
        waiting = {rank: pipe for rank, (_, pipe) in enumerate(self._ranks)}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                ok, answer, groups = _receive(waiting.pop(rank))
                self._groups = max(self._groups[0], groups[0]), max(self._groups[1], groups[1])
                (results if ok else failures)[rank] = answer
                if not ok:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if not ready:
                why = "after another rank failed" if failures else f"within {timeout_s} s"
                failures.update(dict.fromkeys(waiting, f"did not answer {why}"))
                break
        if failures:
            raise RankFailure(
                "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
            )
        return [results[rank] for rank in range(len(self._ranks))]

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._store.cleanup()


def _receive(pipe: Connection) -> tuple[bool, Any, tuple[int, int]]:
    """Whether the rank succeeded, its result or what it raised, and `_group_counts`."""
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):
        return False, "its process has ended", (0, 0)


def _join(rank: int, world_size: int, store: Path) -> None:
    import torch.distributed as dist

    _share_loop()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=200),
    )


def _serve(join: Join, pipe: Connection, rank: int, world_size: int, store: Path) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    join(rank, world_size, store)
    while True:
        try:
            function, args, groups = pipe.recv()
        except EOFError:
            return
        _level_groups(*groups)
        try:
            pipe.send((True, function(*args), _group_counts()))
        except BaseException:
            pipe.send((False, traceback.format_exc(), _group_counts()))


def _group_counts() -> tuple[int, int]:
    """Numbers of process groups that this rank is in, and that torch says it helped to make."""
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_names), distributed_c10d._world.group_count


def _level_groups(members: int, made: int) -> None:
    """Make this rank a member of ``members`` groups, and give all ranks one count of those made.

    An earlier test may have made groups of some ranks only. Torch names the next ones after the
    first number up to torch 2.13, after the second from 2.14 on: both must be equal on all ranks.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not members:
        return
    while len(distributed_c10d._world.pg_names) < members:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    # Beyond the names of the groups just made, of which there are fewer than members.
    distributed_c10d._world.group_count = made + members


def _share_loop() -> None:
    """Make all process groups of this rank wait for messages in one thread.

    Torch gives each a thread that looks a hundred times per second, for good: those of hundreds of
    tests took most of the machine from the tests that followed. Nor can a group be ended: a later
    one of the same ranks would have its name, and wait at its addresses.
    """
    from torch.distributed import ProcessGroupGloo, distributed_c10d

    before = {*os.listdir("/proc/self/task")}
    device = ProcessGroupGloo.create_device(interface="lo")
    # It spins while another thread has locked a connection with news: that one must get its turn.
    # Ranks that share two cores otherwise take a third more time.
    for thread in {*os.listdir("/proc/self/task")} - before:
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)

    class Sharing(ProcessGroupGloo):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any
        ) -> None:
            options = ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [device]
            for name, value in newer.items():  # from torch 2.14 on: enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


class Pools:
    """Hands out pools by world size, and replaces those that failed."""

    #: Whether to run only some of several variants.
    samples = False

    def __init__(self, join: Join | None = None) -> None:
        self._join = join
        self._pools: dict[int, RankPool] = {}

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 400
    ) -> list[Any]:
        if world_size not in self._pools:
            self._pools[world_size] = RankPool(world_size, self._join)
        try:
            return self._pools[world_size].run(function, *args, timeout_s=timeout_s)
        except BaseException:  # an interrupted test too: its answers are not the next one's
            self._pools.pop(world_size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a test that calls it on each of so many ranks.

    Its arguments, parameters and fixtures, are sent to them.
    """

    def decorate(act: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(act)
        def test(ranks: Pools, **arguments: Any) -> None:
            ranks.run(world_size, _act, act.__module__, act.__name__, arguments)

        pools = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        asked = inspect.signature(act).parameters.values()
        test.__signature__ = inspect.Signature([pools, *asked])  # type: ignore[attr-defined]
        return test

    return decorate


def _act(module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call a test's function, found by its name, on this rank."""
    getattr(import_module(module), name).__wrapped__(**arguments)
