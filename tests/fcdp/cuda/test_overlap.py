"""A step from host memory beside one without copies, and a trace of it.

A step with ``NoCache`` is compute, with the other node's part copied inside the device; a step with
``HostCache`` takes that part from page-locked host memory. Weights do not change, so that every
gather after the first is served.
"""

import gzip
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fcdp
from scripts import fake_world
from tests.fcdp.cuda.alone import DEVICE, ON_GPU, alone
from tests.fcdp.cuda.steps import MOST_TRACE_BYTES, ROUNDS, Step, seconds_of, write_trace

pytestmark = pytest.mark.gpu

#: Where copies run under compute.
MOST_RATIO = 1.05


def test_a_step_from_host_memory_is_as_fast_as_one_without_copies(
    artifacts: Path, record_property: Callable[[str, object], None]
) -> None:
    trace = artifacts / "trace.json.gz"
    measured = alone(times, trace)
    assert measured["hits"] > 0
    assert trace.stat().st_size <= MOST_TRACE_BYTES
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event["name"].startswith("fcdp::cache_load") for event in events)
    for name in ("seconds", "host_over_none"):
        record_property(name, measured[name])
    assert not ON_GPU or measured["host_over_none"] <= MOST_RATIO


def times(trace: Path) -> dict[str, Any]:
    """Seconds of both steps, in turns, so that clocks and temperature are shared."""
    with fake_world.world(2, 1, DEVICE.type) as topology:
        steps = {name: Step(topology, name) for name in ("none", "host")}
        for step in [*steps.values()] * 2:
            step()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                step()  # the other step's last use of memory is over
                seconds[name].append(seconds_of(step))
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        write_trace(steps["host"], trace)
        return {
            "seconds": seconds,
            "host_over_none": medians["host"] / medians["none"],
            "hits": fcdp.ledger(steps["host"].model).hits,
        }
