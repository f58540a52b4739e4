"""The trace of a simulated step."""

from __future__ import annotations

import json

import pytest

from simulation.prediction import chrome_trace
from tests.simulation.workloads import predicted


def test_every_task_is_an_event_on_its_streams_row() -> None:
    prediction = predicted("fcdp")
    trace = json.loads(json.dumps(chrome_trace(prediction)))
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(prediction.timeline.tasks)
    assert {"compute", "gather", "reduce", "copy in", "copy out"} <= set(rows.values())
    for event, task in zip(events, prediction.timeline.tasks, strict=True):
        assert (event["name"], rows[event["tid"]]) == (task.name, task.stream)
    ends = [event["ts"] + event["dur"] for event in events]
    assert max(ends) == pytest.approx(1e6 * prediction.step_seconds)
    critical = [event["name"] for event in events if event["cat"] == "critical"]
    assert sorted(critical) == sorted(prediction.critical_path)
