"""Traces of the profiler: how far copies lie under kernels, and what is kept of a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]
Event = dict[str, Any]

#: What the device did; the host's thousands of operators are left out, but for our own names.
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_OURS = "fcdp::"
_ARGUMENTS = ("bytes", "stream", "memory bandwidth (GB/s)")


@dataclass(frozen=True)
class Copies:
    """Copies from page-locked memory to the device."""

    bytes: int
    seconds: float
    #: Of their time, what lies under a kernel.
    share_under_kernels: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds


def read(file: Path) -> list[Event]:
    events: list[Event] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def copies(events: Sequence[Event]) -> Copies | None:
    """``None`` if there is none."""
    found = [e for e in events if _from_host(e)]
    if not found:
        return None
    total = sum(event["dur"] for event in found)
    kernels = [_span(event) for event in events if event.get("cat") == "kernel"]
    hidden = overlap(map(_span, found), kernels)
    return Copies(sum(int(e["args"]["bytes"]) for e in found), total / 1e6, hidden / total)


def _from_host(event: Event) -> bool:
    name = str(event.get("name"))
    return event.get("cat") == "gpu_memcpy" and "HtoD" in name and "Pinned" in name


def overlap(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """How much of ``spans``, added up, lies under any of ``others``."""
    union, total, first = merged(others), 0.0, 0
    for begin, end in sorted(spans):
        while first < len(union) and union[first][1] <= begin:
            first += 1
        for other in union[first:]:
            if other[0] >= end:
                break
            total += min(end, other[1]) - max(begin, other[0])
    return total


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of ``spans``, as spans that do not overlap."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def write_small(events: Sequence[Event], file: Path) -> int:
    """Keep what the device did and what is named by FCDP; returns the bytes of the file."""
    kept = [_shortened(event) for event in events if _worth_keeping(event)]
    text = json.dumps({"traceEvents": kept}, separators=(",", ":"))
    # No time in the header: the same events make the same file.
    file.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))
    return file.stat().st_size


def _worth_keeping(event: Event) -> bool:
    if event.get("ph") == "M":  # names of the rows
        return event.get("name") in ("process_name", "thread_name")
    return event.get("cat") in _ON_DEVICE or str(event.get("name", "")).startswith(_OURS)


def _shortened(event: Event) -> Event:
    if event.get("ph") == "M":
        return event
    arguments = {k: v for k, v in event.get("args", {}).items() if k in _ARGUMENTS}
    fields = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
    return {**{key: event[key] for key in fields if key in event}, "args": arguments}


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]
