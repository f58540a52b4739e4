"""Memory that an iteration takes beside what is held between iterations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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
