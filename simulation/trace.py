"""A simulated step for chrome://tracing and Perfetto."""

from __future__ import annotations

from typing import Any

from simulation.prediction import Prediction

_MICROSECONDS = 1e6


def chrome_trace(prediction: Prediction) -> dict[str, Any]:
    """The step in the Trace Event Format: a row per stream, the critical path marked."""
    timeline = prediction.timeline
    streams = list(dict.fromkeys(task.stream for task in timeline.tasks))
    critical = set(timeline.critical_path)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": stream}}
        for row, stream in enumerate(streams)
    ]
    for index, (task, span) in enumerate(zip(timeline.tasks, timeline.spans, strict=True)):
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": streams.index(task.stream),
                "name": task.name,
                "cat": "critical" if index in critical else "other",
                "ts": span.start * _MICROSECONDS,
                "dur": (span.end - span.start) * _MICROSECONDS,
                "args": {f"{name}_seconds": used for name, used in task.demands.items()},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"evidence": "simulated"}}
