"""Bytes and seconds of an iteration by phase, and the memory that it takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
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


@contextmanager
def most_allocated(device: torch.device) -> Iterator[list[int]]:
    """Append the most bytes that PyTorch's allocator for CPUs gave out at once in the body.

    What was there before does not count, nor do arenas, which are mapped apart: a GPU would hold
    the same beside its shards. On accelerators nothing is appended: they count themselves.
    """
    found: list[int] = []
    if device.type != "cpu":
        yield found
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield found
    kineto: Any = profiler.profiler
    changes = sorted(
        (
            (event.start_ns(), event.nbytes())
            for event in kineto.kineto_results.events()
            if event.name() == "[memory]"
        ),
        key=itemgetter(0),
    )
    found.append(max(accumulate(nbytes for _, nbytes in changes), default=0))
