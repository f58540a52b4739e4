"""Lifetimes of processes, network namespaces and folders: none outlives its owner.

A process dies with the one that started it, however that one ends. Namespaces and folders outlive
a parent that was killed with SIGKILL: their names carry the parent's pid, start time and pid
namespace, so that the next start can tell those without an owner from those of a parent that
still runs.
"""

import ctypes
import itertools
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: Seconds that the kernel has to end what is killed.
_KILLING_S = 10.0

_NAME = re.compile(r"fcdp-(?P<scope>\d+)-(?P<pid>\d+)-(?P<started>\d+)-\d+-.+")
_numbers = itertools.count()

#: The directory for temporary files wherever ``TMPDIR`` does not name one.
USUAL = "/tmp"


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent``, which forked it, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the request: then nobody sends the signal any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, to find and end them all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def end(alive: Callable[[], Collection[int]]) -> Collection[int]:
    """Kill processes until none is ``alive``; return those that stay, stuck in the kernel."""
    deadline = time.monotonic() + _KILLING_S
    while left := alive():
        if time.monotonic() > deadline:
            return left
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return ()


def end_descendants(spare: Collection[int] = ()) -> None:
    """Kill all that this process has started but ``spare``, however deep, and wait for their end.

    What the kernel cannot end (a device that hangs) stays.
    """

    def alive() -> list[int]:
        pids = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.pid not in spare and process.status() != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return pids

    end(alive)


def out_of_memory_kills() -> int:
    """Number of processes that the kernel has killed since it booted because memory ran out."""
    match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def die_with_launcher(end_others: Callable[[], None]) -> None:
    """Call ``end_others`` and kill this process when the one that called ``Process.start`` ends.

    With the fork server that one is not the parent, so the kernel's signal does not help: the
    fork server itself lives as long as any of its children.
    """
    launcher = parent_process()
    assert launcher is not None, "multiprocessing started this process"

    def watch() -> None:
        connection.wait([launcher.sentinel])
        try:
            end_others()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def new_prefix() -> str:
    """A name prefix for one thing of this process: nothing else, past or present, has it."""
    return f"fcdp-{_pid_scope()}-{os.getpid()}-{_started_at(os.getpid())}-{next(_numbers)}"


def is_orphan(name: str) -> bool:
    """Whether a name begins with a prefix of ``new_prefix`` whose process no longer runs."""
    match = _NAME.fullmatch(name)
    if match is None or int(match["scope"]) != _pid_scope():
        return False
    # Another start time: the pid belongs to another process by now.
    return _started_at(int(match["pid"])) != int(match["started"])


def _started_at(pid: int) -> int | None:
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


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, removed afterwards, as are those that killed processes have left."""
    remove_stale()
    with tempfile.TemporaryDirectory(prefix=f"{new_prefix()}-") as name:
        yield Path(name)


def remove_stale() -> None:
    """Remove the folders of processes that were killed; every run does, on whatever cluster."""
    for parent in {tempfile.gettempdir(), USUAL}:
        for path in Path(parent).glob("*"):
            if is_orphan(path.name):
                # Another cluster that starts now may remove it too; another user's stays.
                shutil.rmtree(path, ignore_errors=True)
