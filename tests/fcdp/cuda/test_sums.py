"""Sums of micro-batches in host memory: their copies beside compute, in a trace, and their seconds.

The other node is imitated, and nothing is cached: what goes between host and device are sums.
"""

import gzip
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import fcdp
from scripts import fake_world
from tests.fcdp.cuda.alone import DEVICE, ON_GPU, alone
from tests.fcdp.cuda.steps import MOST_TRACE_BYTES, ROUNDS, Step, seconds_of, write_trace

pytestmark = pytest.mark.gpu

#: Share of the copies between host and device during which a kernel runs.
LEAST_OVERLAP = 0.5


def test_copies_of_sums_overlap_with_compute(
    artifacts: Path, record_property: Callable[[str, object], None]
) -> None:
    trace = artifacts / "trace-sums.json.gz"
    measured = alone(times, trace)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert trace.stat().st_size <= MOST_TRACE_BYTES
    copies = spans(events, "gpu_memcpy", "Memcpy HtoD", "Memcpy DtoH")
    share = overlap(copies, spans(events, "kernel"))
    for name, value in (measured | {"overlap": share}).items():
        record_property(name, value)
    assert measured["host_bytes"] > 0
    assert not ON_GPU or share >= LEAST_OVERLAP


def test_overlap_is_the_share_of_copies_in_which_a_kernel_runs() -> None:
    assert overlap([(0, 4), (6, 8)], [(1, 2), (1, 3), (7, 12)]) == 0.5
    assert overlap([], [(1, 2)]) == 1


class TwoMicroBatches(Step):
    """Two micro-batches, of which the first one's gradients wait."""

    def __call__(self) -> None:
        for last in (False, True):
            with fcdp.accumulate(self.model, last=last):
                self.backward()
        self.model.zero_grad()


def times(trace: Path) -> dict[str, Any]:
    """Seconds of steps whose sums wait on the device and in host memory, in turns."""
    with fake_world.world(2, 1, DEVICE.type) as topology:
        places = ("device", "host")
        steps = {at: TwoMicroBatches(topology, "none", partial_gradients=at) for at in places}
        for step in [*steps.values()] * 2:
            step()
        seconds: dict[str, list[float]] = {at: [] for at in steps}
        for _ in range(ROUNDS):
            for at, step in steps.items():
                seconds[at].append(seconds_of(step))
        write_trace(steps["host"], trace)
        medians = {at: statistics.median(each) for at, each in seconds.items()}
        return {
            "seconds": seconds,
            "host_over_device": medians["host"] / medians["device"],
            "host_bytes": fcdp.ledger(steps["host"].model).host_partials_bytes,
        }


_Span = tuple[float, float]


def spans(events: Iterable[Mapping[str, Any]], kind: str, *names: str) -> list[_Span]:
    """Begin and end of the events of a kind whose names begin so; of all without names."""
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == kind and event["name"].startswith(names or "")
    ]


def overlap(copies: list[_Span], kernels: list[_Span]) -> float:
    """Share of the first spans' time in which one of the second ones is under way."""
    whole = sum(end - begin for begin, end in copies)
    covered, last = 0.0, float("-inf")
    for begin, end in sorted(kernels):
        begin, last = max(begin, last), max(end, last)
        covered += sum(max(0.0, min(end, to) - max(begin, at)) for at, to in copies)
    return covered / whole if whole else 1.0
