"""Names that say which process owns what outlives a process: a namespace, a folder.

Both outlive a parent that was killed with SIGKILL. Their names carry the parent's pid, start time
and pid namespace, so that the next start can tell the ones nobody owns any more from those of a
parent that still runs.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

_NAME = re.compile(r"fcdp-(?P<scope>\d+)-(?P<pid>\d+)-(?P<started>\d+)-\d+-.+")
_things = itertools.count()


def new_prefix() -> str:
    """A name prefix for one thing of this process: nothing else, past or present, has it."""
    return f"fcdp-{_pid_scope()}-{os.getpid()}-{_started_at(os.getpid())}-{next(_things)}"


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
