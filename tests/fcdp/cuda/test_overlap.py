"""A step from host memory beside one without copies, and a trace of it.

A step with ``NoCache`` is compute, with the other node's part copied inside the device; a step with
``HostCache`` takes that part from page-locked host memory. Weights do not change, so that every
gather after the first is served.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import fcdp
from scripts import fake_world
from tests.fcdp.cuda.alone import DEVICE, ON_GPU, alone, shard

pytestmark = pytest.mark.gpu

#: 1.1 billion parameters, where it is to say something.
LAYERS, WIDTH, TOKENS, MICRO_BATCH, ROUNDS = (
    (20, 2048, 1024, 16, 10) if ON_GPU else (2, 64, 16, 1, 2)
)
LOOK_AHEAD = 2
#: Where copies run under compute.
MOST_RATIO = 1.05
MOST_TRACE_BYTES = 2 * 2**20


def test_a_step_from_host_memory_is_as_fast_as_one_without_copies(
    tmp_path: Path, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    folder = pytestconfig.getoption("--keep")
    trace = Path(folder or tmp_path).absolute() / "trace.json.gz"
    found = alone(times, trace)
    assert found["hits"] > 0
    assert trace.stat().st_size <= MOST_TRACE_BYTES
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event["name"].startswith("fcdp::cache_load") for event in events)
    for name in ("seconds", "host_over_none"):
        record_property(name, found[name])
    assert not ON_GPU or found["host_over_none"] <= MOST_RATIO


def times(trace: Path) -> dict[str, Any]:
    """Seconds of both steps, in turns, so that clocks and temperature are shared."""
    with fake_world.world(2, 1, DEVICE.type) as topology:
        steps = {name: Step(topology, name) for name in ("none", "host")}
        for step in steps.values():
            for _ in range(2):
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


class Step:
    """Forward and backward; no optimizer step, so that what is cached stays fresh."""

    def __init__(self, topology: fcdp.Topology, engine: str) -> None:
        config = GPT2Config(
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=max(1, WIDTH // 128),
            n_positions=TOKENS,
            vocab_size=50304,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        with DEVICE:  # made there: on the host it would take most of a minute
            self.model: Any = GPT2LMHeadModel(config)
            self._tokens = torch.randint(50257, (MICRO_BATCH, TOKENS))
        shard(self.model, self.model.transformer.h, topology, engine, LOOK_AHEAD)

    def __call__(self) -> None:
        self.model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss.backward()
        self.model.zero_grad()


def seconds_of(call: Callable[[], object]) -> float:
    synchronize = torch.cuda.synchronize if ON_GPU else lambda: None
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - started


def write_trace(step: Step, file: Path) -> None:
    """The events alone, and no time in the header: the file names nothing of this machine."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    for _ in range(2):  # the first sets the profiler up while the step waits
        with profile(activities=activities) as profiler:
            seconds_of(step)
    whole = file.with_name("whole.json")
    profiler.export_chrome_trace(str(whole))
    events = json.loads(whole.read_text(encoding="utf-8"))["traceEvents"]
    whole.unlink()
    kept = json.dumps({"traceEvents": events}, separators=(",", ":"))
    file.write_bytes(gzip.compress(kept.encode("utf-8"), mtime=0))
