"""What the host cache costs a step where nothing has to cross a network.

A step with ``NoCache`` is compute, with the other node's part copied inside the device; a step with
``HostCache`` takes that part from page-locked host memory. Weights do not change, so that every
gather after the first is served. The other rank is imitated, the copies are real.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

import fcdp
from scripts.gpu import fake, groups, trace
from scripts.gpu.rank import Rank
from scripts.gpu.records import NOT_ON_CPU, Brief, Record

TRACE = "trace.json.gz"
MOST_TRACE_BYTES = 2 * 2**20
#: The targets: host cache over none, and the copies' bandwidth over that of a plain copy.
MOST_RATIO, LEAST_BANDWIDTH = 1.05, 0.9
#: What stays bare is the copies before the first kernel, and those after the last.
LEAST_SHARE = 0.8
_LOOK_AHEAD = 2
_PLAIN_COPY_BYTES = 2**28


def sizes(small: bool) -> dict[str, int]:
    """1.1 billion parameters, where it is to say something."""
    if small:
        return {"layers": 2, "width": 64, "tokens": 16, "micro_batch": 1, "rounds": 2}
    return {"layers": 20, "width": 2048, "tokens": 1024, "micro_batch": 16, "rounds": 10}


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    size = sizes(brief.small)
    outcome = groups.run(
        "overlap",
        {**size, "trace": str(brief.out.absolute() / TRACE)},
        world_size=1,
        device=brief.device,
        limit_s=limit_s,
    )
    if outcome.state != "ended":
        record.failed("steps", "\n".join([str(outcome), *outcome.stacks]))
    found: dict[str, Any] = {}
    for line in outcome.lines[0]:
        found |= line
    record.details = {"sizes": size, **found}
    judge(record, found, brief.device == "cpu")


def judge(record: Record, found: dict[str, Any], on_cpu: bool) -> None:
    """Hold what was found against the targets."""
    if "host_over_none" not in found:
        return
    record.figures["parameters"] = found["parameters"]
    record.passed_if(found["hits"] > 0, "the cache serves gathers", f"{found['hits']} hits")
    if on_cpu:
        record.not_measured("host cache over none", f"{NOT_ON_CPU}: nothing there overlaps")
    else:
        ratio = found["host_over_none"]
        record.figures["host cache over none"] = ratio
        record.passed_if(
            ratio <= MOST_RATIO, f"host cache over none at most {MOST_RATIO}", f"{ratio:.3f}"
        )
    if "trace_bytes" not in found:
        return
    record.passed_if(
        found["trace_bytes"] <= MOST_TRACE_BYTES, "the trace is small", f"{found['trace_bytes']} B"
    )
    if found["copies"] is None:
        if on_cpu:
            record.not_measured("copies under compute", NOT_ON_CPU)
        else:
            record.failed("copies under compute", "the trace has no copy from page-locked memory")
        return
    share = found["copies"]["share_under_kernels"]
    bandwidth = found["copies"]["bytes_per_s"] / found["plain_copy_bytes_per_s"]
    record.figures["copies under kernels"] = share
    record.figures["copies over plain bandwidth"] = bandwidth
    record.passed_if(share >= LEAST_SHARE, "copies run under compute", f"{share:.1%} of their time")
    record.passed_if(
        bandwidth >= LEAST_BANDWIDTH,
        f"copies reach {LEAST_BANDWIDTH:.0%} of a plain page-locked copy's bandwidth",
        f"{bandwidth:.1%}",
    )


def on_this_rank(rank: Rank) -> None:
    with fake.world(2, 1, rank.device.type) as topology:
        steps = {
            name: _Step(rank, topology, policy)
            for name, policy in (("none", fcdp.NoCache()), ("host", fcdp.HostCache()))
        }
        seconds = interleaved(steps, rank.brief["rounds"])
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        rank.answer(
            {
                "parameters": steps["host"].parameters,
                "none_seconds": seconds["none"],
                "host_seconds": seconds["host"],
                "host_over_none": medians["host"] / medians["none"],
                "hits": fcdp.ledger(steps["host"].model).hits,
            }
        )
        rank.answer(_traced(steps["host"], Path(rank.brief["trace"])))


class _Step:
    """Forward and backward; no optimizer step, so that what is cached stays fresh."""

    def __init__(self, rank: Rank, topology: fcdp.Topology, policy: fcdp.CachePolicy) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width, tokens = (int(rank.brief[name]) for name in ("layers", "width", "tokens"))
        config = GPT2Config(
            n_embd=width,
            n_layer=layers,
            n_head=max(1, width // 128),
            n_positions=tokens,
            vocab_size=50304,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        with rank.device:  # made there: on the host it would take most of a minute
            self.model: Any = GPT2LMHeadModel(config)
        self.parameters = int(self.model.num_parameters())
        self.device = rank.device
        fcdp.shard(
            self.model,
            topology,
            units=self.model.transformer.h,
            policy=policy,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            look_ahead=_LOOK_AHEAD,
        )
        shape = (int(rank.brief["micro_batch"]), tokens)
        self._tokens = torch.randint(50257, shape, device=rank.device)

    def __call__(self) -> None:
        self.model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss.backward()
        self.model.zero_grad()


def interleaved(steps: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns, so that clocks and temperature are shared."""
    for step in steps.values():
        for _ in range(2):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # the other step's last use of memory is over
            found[name].append(seconds(step, step.device))
    return found


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _traced(step: _Step, file: Path) -> dict[str, Any]:
    on_cpu = step.device.type == "cpu"
    activities = [ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        for _ in range(2):  # the first sets the profiler up while the step waits
            with profile(activities=activities) as profiler:
                step()
                if not on_cpu:
                    torch.cuda.synchronize()
        profiler.export_chrome_trace(str(whole))
        events = trace.read(whole)
    found = trace.copies(events)
    return {
        "trace_bytes": trace.write_small(events, file),
        "copies": None
        if found is None
        else {
            "bytes": found.bytes,
            "bytes_per_s": found.bytes_per_s,
            "share_under_kernels": found.share_under_kernels,
        },
        "plain_copy_bytes_per_s": None if on_cpu else _plain_bandwidth(step.device),
    }


def _plain_bandwidth(device: torch.device) -> float:
    """Of one large copy from page-locked memory, the best of ten."""
    source = torch.empty(_PLAIN_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_PLAIN_COPY_BYTES, dtype=torch.uint8, device=device)

    def copy() -> object:
        return target.copy_(source, non_blocking=True)

    return _PLAIN_COPY_BYTES / min(seconds(copy, device) for _ in range(10))
