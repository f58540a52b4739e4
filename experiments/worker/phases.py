"""Bytes and seconds of an iteration by phase, and the memory that it takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

from experiments.worker.objectives.objective import Phase


class Phases:
    """Sums over iterations since the last ``clear``, of this rank and its node."""

    def __init__(self, sent_bytes: Callable[[], int]) -> None:
        """``sent_bytes`` reads what this node has sent so far while no rank sends."""
        self._sent_bytes = sent_bytes
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._sums: dict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """Have the first phase begin. Collective."""
        self._sent, self._at = self._sent_bytes(), time.perf_counter()

    def end(self, phase: Phase) -> None:
        """Count all since the last phase's end as this one's. Collective."""
        sent, at = self._sent, self._at
        self.begin()
        self._sums[f"{phase}_bytes"] += self._sent - sent
        self._sums[f"{phase}_seconds"] += self._at - at

    def per_step(self, steps: int) -> dict[str, float]:
        """Means over the steps, by field of a measurement; empty where no phase has ended."""
        return {name: total / steps for name, total in self._sums.items()}


class Allocated:
    """Bytes that PyTorch's allocator for CPUs has given out since, and not got back.

    Where the CPU is the device: arenas of host memory are mapped apart, and do not count. What
    counts takes time.
    """

    def __init__(self) -> None:
        self._from = 0
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def mark(self) -> None:
        """Have ``most`` look at what comes from now on."""
        self._from = time.time_ns()

    def most(self) -> int:
        """Count no more; returns the most bytes that were out at once since the mark."""
        self._profiler.stop()
        kineto: Any = self._profiler.profiler
        changes: list[tuple[int, int]]
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in kineto.kineto_results.events()
            if event.name() == "[memory]"
        )
        out = accumulate(nbytes for _, nbytes in changes)
        return max(total for (at, _), total in zip(changes, out, strict=True) if at >= self._from)
