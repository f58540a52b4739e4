"""How busy this machine is with others' work: its load, and what its own host takes of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from experiments.records.record import Machine

_STAT = Path("/proc/stat")
#: Seconds over which a run looks before it starts.
_LOOK_S = 0.5


class Watch:
    """Counts what the host takes from now on; its load is the one of now."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._cores = len(os.sched_getaffinity(0))
        self._before = _jiffies()

    def machine(self) -> Machine:
        """What the machine was like since this watch, or the last call of this, began."""
        now = _jiffies()
        steal, passed = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return Machine(
            load=self._load, cores=self._cores, steal_share=steal / passed if passed else 0.0
        )


def look() -> Machine:
    """Watch for a moment, before a run adds its own load."""
    watch = Watch()
    time.sleep(_LOOK_S)
    return watch.machine()


def _jiffies() -> tuple[int, int]:
    """Time that the host has taken of all processors, and all time; zeros where nothing says so."""
    try:
        fields = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0, 0
    counts = [int(field) for field in fields]
    return counts[7], sum(counts)
