"""Spans of a step: from the simulator's trace, and from one of torch's profiler."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from analysis.timeline import load
from simulation.prediction import chrome_trace
from tests.experiments.golden import tables
from tests.simulation.workloads import predicted


def event(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "args": {}, **more}


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    file = folder / "cell" / "profile" / "rank1.json.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return file


def test_a_simulated_step_has_each_task_where_it_takes_most(tmp_path: Path) -> None:
    prediction = predicted("fcdp")
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(chrome_trace(prediction)))
    step = load(file)
    assert (step.name, step.evidence) == ("trace", "simulated")
    assert step.seconds == pytest.approx(prediction.step_seconds)
    lasting = [s for s in prediction.timeline.spans if s.end > s.start]
    assert len(step.spans) == len(lasting)
    crossing = [span for span in step.spans if span.lane == "gather, between nodes"]
    assert {span.phase for span in crossing} == {"forward"}
    assert {s.phase for s in step.spans if s.lane == "gather, inside the node"} == {
        "forward",
        "backward",
    }


def test_an_exchange_lasts_until_the_backend_is_done(tmp_path: Path) -> None:
    traced = tables(__file__)
    step = load(written(tmp_path, [event(*each) for each in traced["events"]]))
    assert step.name == "cell, rank1"
    ends = [[round(1e6 * at, 1) for at in (span.start, span.end)] for span in step.spans]
    spans = [[s.lane, s.phase, *both] for s, both in zip(step.spans, ends, strict=True)]
    assert sorted(spans) == sorted(traced["spans"])


def test_without_this_library_the_ranges_are_fsdp2s(tmp_path: Path) -> None:
    events = [event("FSDP::all_gather (block)", 0, 5), event("gloo:all_gather", 1, 20)]
    (span,) = load(written(tmp_path, events)).spans
    assert (span.lane, span.end) == ("gather, between nodes", pytest.approx(21e-6))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not a trace"),
        (b"\x1f\x8b not compressed", "not a trace"),
        (b'{"traceEvents": []}', "no exchange of FCDP or FSDP2"),
    ],
)
def test_what_is_no_trace_is_an_error_with_its_file(
    content: bytes, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "rank0.json.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"rank0\.json\.gz.*{says}"):
        load(file)


def test_a_trace_of_a_gpu_is_refused(tmp_path: Path) -> None:
    events = [event("fcdp::gather_inter block", 0, 5), event("gemm", 1, 20, cat="kernel")]
    with pytest.raises(ValueError, match="kernels of a GPU"):
        load(written(tmp_path, events))
