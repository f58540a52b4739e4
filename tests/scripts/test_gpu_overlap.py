"""The host cache's benchmark on a GPU: how it reads a trace, and a small run where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu_overlap import copies_under_kernels, merged

ROOT = Path(__file__).resolve().parents[2]


def test_spans_that_touch_become_one() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_a_copy_counts_as_hidden_as_far_as_kernels_run_beside_it(tmp_path: Path) -> None:
    def event(kind: str, name: str, begin: float, length: float) -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": begin, "dur": length, "args": {"bytes": 100}}

    pinned = "Memcpy HtoD (Pinned -> Device)"
    events = [
        event("kernel", "gemm", 0, 10),
        event("kernel", "gemm", 5, 10),
        event("gpu_memcpy", pinned, 10, 10),  # half of it under the second kernel
        event("gpu_memcpy", pinned, 30, 10),  # none of it
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 0, 10),
        {"name": "not timed"},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert copies_under_kernels(trace) == (200, 20e-6, 0.25)


def run(out: Path) -> subprocess.CompletedProcess[str]:
    small = ["--layers", "4", "--width", "512", "--tokens", "128", "--steps", "3"]
    command = [sys.executable, "-m", "scripts.gpu_overlap", *small, "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_small_run_measures_copies_and_steps(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "overlap.json").read_text())
    assert len(record["host_seconds"]) == len(record["none_seconds"]) == 3
    assert record["copied_bytes"] > 0
    assert 0 < record["copy_time_under_kernels"] <= 1
    assert (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("gpu_overlap: needs a CUDA device")
