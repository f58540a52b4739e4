"""Time by phase of a step: forward, backward with its reductions, the optimizer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds that this rank has spent in each phase since the last ``take``.

    On the CPU a call returns when its work is done. On an accelerator it returns when the work is
    queued, so that its time says nothing, and nothing is kept.
    """

    def __init__(self, device_type: str) -> None:
        self._on_cpu = device_type == "cpu"
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the block's time as this phase's."""
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin

    def take(self) -> dict[str, float] | None:
        """Return the seconds by phase and begin again; ``None`` on an accelerator."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken if self._on_cpu else None
