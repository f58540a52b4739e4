"""Launches on clusters of any kind, and what their ranks do, which import it by its name.

Torch is imported where it is used: a rank of a rented node that only waits need not wait for it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from experiments.clusters.interface import Cluster, Launch, Outcome
from tests.experiments.planted import markers
from tests.experiments.waiting import wait_until
from tests.programs import ROOT

ON_RANKS = __name__
FOREVER_S = 600


def run(
    cluster: Cluster,
    logs: Path,
    function: str,
    *arguments: str,
    timeout_s: float = 100,
    **variables: str,
) -> Outcome:
    """Call a function of ``on_ranks`` on every rank, with ``variables`` in its environment."""
    environment = {"TEST_CGROUP": os.environ.get("TEST_CGROUP", ""), **variables}
    entry = f"{ON_RANKS}:{function}"
    common = {"logs": logs, "environment": environment, "timeout_s": timeout_s}
    return cluster.run(Launch(entry=entry, arguments=arguments, **common))


def described(cluster: Cluster, folder: Path, **variables: str) -> Sequence[dict[str, Any]]:
    """Launch ``describe`` on two nodes of two ranks; return what each rank has written down.

    No rank sees a secret, and each sees what is passed on and where it is, as torchrun says it.
    """
    launched = run(cluster, folder / "logs", "describe", str(folder), GIVEN="$value", **variables)
    assert launched == Outcome("ok")
    texts = [(folder / f"{rank}.json").read_text() for rank in range(4)]
    seen = [json.loads(text) for text in texts]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    for rank, each in enumerate(seen):
        assert markers(texts[rank]) == []
        environment = each["environment"]
        assert environment["MY_TOKEN"] == "a gated model's"
        assert environment["GIVEN"] == "$value"
        place = [int(environment[name]) for name in names]
        assert place == [rank, 4, rank % 2, 2, rank // 2]
    return seen


@contextmanager
def lingering(kind: str, folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process of its own with a cluster of this kind whose four ranks wait for ever."""
    command = [sys.executable, "-m", "tests.experiments.clusters.lingering", kind, str(folder)]
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            wait_until(
                lambda: len([*folder.glob("first/*.pids")]) == 4 or parent.poll() is not None, 100
            )
            assert parent.poll() is None, parent.stderr and parent.stderr.read()
            yield parent
        finally:
            parent.kill()


def pids_below(directory: Path) -> list[int]:
    """Ranks, what started them, and the ranks' own children, of those that linger."""
    return [pid for path in directory.glob("*.pids") for pid in json.loads(path.read_text())]


def add_up() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    dist.destroy_process_group()


class _Slow:
    """An object that takes its time when the interpreter tears modules down."""

    def __del__(self) -> None:
        time.sleep(0.5)


_slow: list[_Slow] = []


def _leave_a_thread_inside_of_torch(directory: str) -> None:
    """Have a thread wait in torch, which comes back when Python has begun to end.

    As gloo's could: they wait for the interpreter to let go of a tensor.
    """
    import torch.distributed as dist

    _slow.append(_Slow())
    waits = dist.HashStore()  # type: ignore[attr-defined]
    arguments = (["what nobody writes"], timedelta(seconds=0.2))
    threading.Thread(target=waits.wait, args=arguments, daemon=True).start()
    ended = Path(directory, f"{os.environ['RANK']}.ended")
    Finalize(None, ended.touch, exitpriority=0)


def describe(directory: str) -> None:
    """Write down what the rank sees, and return while a thread is inside of torch.

    It leaves a temporary file.
    """
    import torch

    rank = int(os.environ["RANK"])
    print(f"out of rank {rank}")
    print(f"err of rank {rank}", file=sys.stderr)
    seen = {
        "environment": dict(os.environ),
        "as the kernel shows it": Path("/proc/self/environ").read_text(),
        "pid": os.getpid(),
        "interfaces": sorted(os.listdir("/proc/self/net/dev_snmp6")),
        "threads": torch.get_num_threads(),
        "cores": _cores_of_threads(),
        "temporary": tempfile.mkstemp()[1],
    }
    Path(directory, f"{rank}.json").write_text(json.dumps(seen))
    _leave_a_thread_inside_of_torch(directory)


def _cores_of_threads() -> list[list[int]]:
    """The cores of this process's threads, each set once."""
    a_thread = [*Path("/proc/self/task").iterdir()]
    return [*map(list, {tuple(sorted(os.sched_getaffinity(int(t.name)))) for t in a_thread})]


def show_file(path: str) -> None:
    print(Path(path).read_text())


def fail(how: str, failing: str) -> None:
    """All-reduce for ever; one rank ends in the third step, in the way asked for."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    try:
        dist.init_process_group("gloo")
        total = torch.ones(1000)
        for step in range(10**9):
            if rank == int(failing) and step == 3:
                _go(how)
            dist.all_reduce(total)
    finally:
        # As careful functions do; its peers then see a lost connection before this rank has ended.
        if how == "raise and clean up":
            dist.destroy_process_group()


def _go(how: str) -> None:
    import torch

    if how.startswith("raise"):
        raise ValueError("the cause of it all")
    if how == "kernel out of memory":
        Path(os.environ["TEST_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
        torch.ones(2**30)
    if how == "exit":
        sys.exit(3)
    if how == "vanish":
        os._exit(0)
    os.kill(os.getpid(), getattr(signal, how))


def linger(directory: str) -> None:
    """Write down the pid and that of a child, and wait deaf to friendly signals."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True)
    partial = Path(directory, f"{os.environ['RANK']}.partial")
    partial.write_text(json.dumps([os.getpid(), os.getppid(), child.pid]))
    partial.rename(partial.with_suffix(".pids"))
    time.sleep(FOREVER_S)


def fail_while_others_linger(directory: str) -> None:
    """Rank 0 fails once the others wait for something that will not come."""
    if os.environ["RANK"] != "0":
        linger(directory)
    others = int(os.environ["WORLD_SIZE"]) - 1
    while len(list(Path(directory).glob("*.pids"))) < others:
        time.sleep(0.01)
    raise ValueError("the cause of it all")
