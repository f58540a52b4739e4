"""What the host cache costs a device: memory, and the time of a step that needs no network.

Both are of one rank, whose device, streams, allocator and copies are real; the others are imitated.

What the device still reads cannot be reused, so memory shows what is in flight: with a GPU that is
slower than its host a library that holds gathered units too long grows towards the whole model.

A step with ``NoCache`` is compute, with the other node's part copied inside the device; a step with
``HostCache`` takes that part from page-locked host memory. Weights do not change, so that every
gather after the first is served.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import fcdp
from scripts.gpu import fake, ranks
from scripts.gpu.ranks import Rank
from scripts.gpu.records import NOT_ON_CPU, Brief, Record, shared

NODES, RANKS_PER_NODE = 2, 8
POLICIES = {"fsdp2": None, "none": fcdp.NoCache(), "host": fcdp.HostCache()}
LOOK_AHEAD = 1
#: Slices that a gather may have in flight: a ring of two, and what is fetched ahead.
_SLICES = 2 + LOOK_AHEAD
#: The allocator takes segments of 2 MiB and more; the small ones of a step beside FSDP2's.
_SEGMENT, _SMALL = 2 * 2**20, 32 * 2**20
_STEPS = 3
_STATISTICS = {
    "active_peak": "active_bytes.all.peak",
    "allocated_peak": "allocated_bytes.all.peak",
    "reserved_peak": "reserved_bytes.all.peak",
}

TRACE = "trace.json.gz"
MOST_TRACE_BYTES = 2 * 2**20
#: The targets: host cache over none, and the copies' bandwidth over that of a plain copy.
MOST_RATIO, LEAST_BANDWIDTH = 1.05, 0.9
#: What stays bare is the copies before the first kernel, and those after the last.
LEAST_SHARE = 0.8
_LOOK_AHEAD_IN_TIME = 2
_PLAIN_COPY_BYTES = 2**28


def _sharded(
    model: Any, units: Iterable[Any], topology: fcdp.Topology, engine: str, look_ahead: int
) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    policy = POLICIES[engine]
    if policy is None:
        for module in [*units, model]:
            fully_shard(module, mesh=topology.mesh, mp_policy=precision)
    else:
        fcdp.shard(
            model,
            topology,
            units=units,
            policy=policy,
            mp_policy=precision,
            look_ahead=look_ahead,
        )


# ------------------------------------------------------------------------------------- memory


def memory_sizes(small: bool) -> dict[str, int]:
    """Square units of ``width``² values in bf16: 24 of 200 MB."""
    if small:
        return {"units": 4, "width": 64, "products": 1, "tokens": 8}
    # One product of 8,192 rows takes some 2.5 ms: a unit keeps the GPU busy for ten.
    return {"units": 24, "width": 10_000, "products": 4, "tokens": 8192}


def allowed(width: int) -> int:
    """Bytes by which a cache may exceed FSDP2: slices, each in segments of the allocator."""
    slice_bytes = 2 * width * width // RANKS_PER_NODE
    return _SLICES * -(-slice_bytes // _SEGMENT) * _SEGMENT + _SMALL


def memory(brief: Brief, record: Record, limit_s: float) -> None:
    """Device memory of FSDP2, no cache and host cache, as one of 16 ranks has it."""
    size = memory_sizes(brief.small)
    found: dict[str, dict[str, Any]] = {}
    for engine, seconds in shared(dict.fromkeys(POLICIES, 1.0), limit_s):
        outcome = ranks.run(
            peaks_on_this_rank,
            {"engine": engine, "size": size},
            world_size=1,
            device=brief.device,
            limit_s=seconds,
        )
        if outcome.state != "ended":
            record.failed(f"{engine}: steps", str(outcome))
        elif outcome.lines[0]:
            found[engine] = outcome.lines[0][0]
            served = engine != "host" or found[engine]["hits"] > 0
            record.passed_if(served, f"{engine}: steps", "" if served else "the cache served none")
    record.details = {"sizes": size, "world": f"{NODES} × {RANKS_PER_NODE}", **found}
    judge_memory(record, found, size["width"])


def judge_memory(record: Record, found: dict[str, dict[str, Any]], width: int) -> None:
    """Compare the engines' peaks with FSDP2's."""
    record.details["allowed_bytes"] = allowed(width)
    if any("not_measured" in each for each in found.values()):
        record.not_measured("device memory", NOT_ON_CPU)
        return
    for engine, of in found.items():
        peaks = f"{of['active_peak'] / 1e9:.2f}/{of['reserved_peak'] / 1e9:.2f}"
        record.figures[f"{engine} active/reserved GB"] = peaks
    if "fsdp2" not in found:
        return
    plain = found["fsdp2"]
    for engine in [name for name in found if name != "fsdp2"]:
        for name in _STATISTICS:
            more = found[engine][name] - plain[name]
            record.details[f"{engine}_minus_fsdp2_{name}"] = more
            if name != "allocated_peak":
                record.passed_if(
                    more <= allowed(width),
                    f"{engine}: {name} exceeds FSDP2's by slices in flight at most",
                    f"{more / 1e6:.1f} MB more, {allowed(width) / 1e6:.1f} MB allowed",
                )
        record.passed_if(
            found[engine]["retries"] <= plain["retries"],
            f"{engine}: the allocator tries again no more often than with FSDP2",
            f"{found[engine]['retries']} times",
        )
    ahead = plain["host_seconds"] / plain["device_seconds"]
    record.figures["host/device time of a forward"] = ahead
    record.passed_if(
        ahead < 0.5, "the GPU bounds the forward: its host ran ahead", f"{ahead:.2f} of the time"
    )


class _Busy(nn.Module):
    """A unit that keeps the GPU busy for long and takes little memory but its weight."""

    def __init__(self, size: Mapping[str, int], scratch: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        width = size["width"]
        self.weight = nn.Parameter(torch.empty(width, width, device=scratch[0].device))
        nn.init.normal_(self.weight, std=0.1 * width**-0.5)
        self._products = size["products"]
        self._scratch = scratch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, product = self._scratch
        with torch.no_grad():
            for _ in range(self._products):
                torch.mm(given, self.weight, out=product)
        return x + nn.functional.linear(x, self.weight)


def peaks_on_this_rank(rank: Rank) -> None:
    device, engine, size = rank.device, rank.brief["engine"], rank.brief["size"]
    with fake.world(NODES, RANKS_PER_NODE, device.type) as topology:
        rows, bf16 = (size["tokens"], size["width"]), torch.bfloat16
        scratch = (
            torch.randn(rows, dtype=bf16, device=device),
            torch.empty(rows, dtype=bf16, device=device),
        )
        model = nn.Sequential(*(_Busy(size, scratch) for _ in range(size["units"])))
        _sharded(model, model, topology, engine, LOOK_AHEAD)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        x = torch.randn(8, size["width"], dtype=bf16, device=device)

        def step(begin: Callable[[], None], end: Callable[[], None]) -> float:
            """Forward, backward and step; the forward's seconds on the host."""
            begin()
            started = time.perf_counter()
            loss = model(x).float().square().mean()
            host_seconds = time.perf_counter() - started
            end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return host_seconds

        found = _peaks(step, device)
        found["hits"] = None if engine == "fsdp2" else fcdp.ledger(model).hits
        rank.answer(found)


def _peaks(
    step: Callable[[Callable[[], None], Callable[[], None]], float], device: torch.device
) -> dict[str, Any]:
    """Run the steps; on a device, what its allocator counted meanwhile."""
    if device.type == "cpu":
        for _ in range(_STEPS):
            step(lambda: None, lambda: None)
        return {"not_measured": NOT_ON_CPU}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what sharding left
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    for _ in range(_STEPS):
        # The first forward also loads kernels: the last one counts.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host_seconds = step(begin.record, end.record)
        torch.cuda.synchronize()
    counted = torch.cuda.memory_stats(device)
    return {
        **{name: counted[key] for name, key in _STATISTICS.items()},
        "retries": counted.get("num_alloc_retries", 0) - before,
        "host_seconds": host_seconds,
        "device_seconds": begin.elapsed_time(end) / 1e3,
    }


# --------------------------------------------------------------------------------------- time


def step_sizes(small: bool) -> dict[str, int]:
    """1.1 billion parameters, where it is to say something."""
    if small:
        return {"layers": 2, "width": 64, "tokens": 16, "micro_batch": 1, "rounds": 2}
    return {"layers": 20, "width": 2048, "tokens": 1024, "micro_batch": 16, "rounds": 10}


def overlap(brief: Brief, record: Record, limit_s: float) -> None:
    """A step from host memory beside one without copies, and how far copies lie under kernels."""
    size = step_sizes(brief.small)
    outcome = ranks.run(
        times_on_this_rank,
        {**size, "trace": brief.out.absolute() / TRACE},
        world_size=1,
        device=brief.device,
        limit_s=limit_s,
    )
    if outcome.state != "ended":
        record.failed("steps", str(outcome))
    found = {key: value for line in outcome.lines[0] for key, value in line.items()}
    record.details = {"sizes": size, **found}
    judge_overlap(record, found, brief.device == "cpu")


def judge_overlap(record: Record, found: Mapping[str, Any], on_cpu: bool) -> None:
    """Hold what was found against the targets."""
    if "host_over_none" not in found:
        return
    record.figures["parameters"] = found["parameters"]
    record.passed_if(found["hits"] > 0, "the cache serves gathers", f"{found['hits']} hits")
    ratio = found["host_over_none"]
    if on_cpu:
        record.not_measured("host cache over none", f"{NOT_ON_CPU}: nothing there overlaps")
    else:
        record.figures["host cache over none"] = ratio
        record.passed_if(
            ratio <= MOST_RATIO, f"host cache over none at most {MOST_RATIO}", f"{ratio:.3f}"
        )
    if "trace_bytes" not in found:
        return
    record.passed_if(
        found["trace_bytes"] <= MOST_TRACE_BYTES, "the trace is small", f"{found['trace_bytes']} B"
    )
    copied = found["copies"]
    if copied is None and on_cpu:
        record.not_measured("copies under compute", NOT_ON_CPU)
    elif copied is None:
        record.failed("copies under compute", "the trace has no copy from page-locked memory")
    else:
        share = copied["share_under_kernels"]
        bandwidth = copied["bytes"] / copied["seconds"] / found["plain_copy_bytes_per_s"]
        record.figures["copies under kernels"] = share
        record.figures["copies over plain bandwidth"] = bandwidth
        record.passed_if(share >= LEAST_SHARE, "copies run under compute", f"{share:.1%} of them")
        record.passed_if(
            bandwidth >= LEAST_BANDWIDTH,
            f"copies reach {LEAST_BANDWIDTH:.0%} of a plain page-locked copy's bandwidth",
            f"{bandwidth:.1%}",
        )


def times_on_this_rank(rank: Rank) -> None:
    with fake.world(2, 1, rank.device.type) as topology:
        steps = {name: _Step(rank, topology, name) for name in ("none", "host")}
        seconds = _interleaved(steps, rank.brief["rounds"])
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
        rank.answer(_traced(steps["host"], rank.brief["trace"]))


class _Step:
    """Forward and backward; no optimizer step, so that what is cached stays fresh."""

    def __init__(self, rank: Rank, topology: fcdp.Topology, engine: str) -> None:
        # The other parts run without it.
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width, tokens = (rank.brief[name] for name in ("layers", "width", "tokens"))
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
        _sharded(self.model, self.model.transformer.h, topology, engine, _LOOK_AHEAD_IN_TIME)
        shape = (rank.brief["micro_batch"], tokens)
        self._tokens = torch.randint(50257, shape, device=rank.device)

    def __call__(self) -> None:
        self.model(input_ids=self._tokens, labels=self._tokens, use_cache=False).loss.backward()
        self.model.zero_grad()


def _interleaved(steps: Mapping[str, _Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns, so that clocks and temperature are shared."""
    for step in steps.values():
        for _ in range(2):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()  # the other step's last use of memory is over
            found[name].append(_seconds(step, step.device))
    return found


def _seconds(call: Callable[[], object], device: torch.device) -> float:
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
        events = json.loads(whole.read_text(encoding="utf-8"))["traceEvents"]
    # The events alone, and no time in the header: the file names nothing of this machine.
    kept = json.dumps({"traceEvents": events}, separators=(",", ":"))
    file.write_bytes(gzip.compress(kept.encode("utf-8"), mtime=0))
    found = copies(events)
    return {
        "trace_bytes": file.stat().st_size,
        "copies": None if found is None else found._asdict(),
        "plain_copy_bytes_per_s": None if on_cpu else _plain_bandwidth(step.device),
    }


def _plain_bandwidth(device: torch.device) -> float:
    """Of one large copy from page-locked memory, the best of ten."""
    source = torch.empty(_PLAIN_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_PLAIN_COPY_BYTES, dtype=torch.uint8, device=device)

    def copy() -> object:
        return target.copy_(source, non_blocking=True)

    return _PLAIN_COPY_BYTES / min(_seconds(copy, device) for _ in range(10))


# -------------------------------------------------------------------------------------- trace

Span = tuple[float, float]
Event = dict[str, Any]


class Copies(NamedTuple):
    """Copies from page-locked memory to the device."""

    bytes: int
    seconds: float
    #: Of their time, what lies under a kernel.
    share_under_kernels: float


def copies(events: Sequence[Event]) -> Copies | None:
    """``None`` if there is none."""
    found = [event for event in events if _from_host(event)]
    if not found:
        return None
    total = sum(event["dur"] for event in found)
    kernels = [_span(event) for event in events if event.get("cat") == "kernel"]
    hidden = under(map(_span, found), kernels)
    return Copies(sum(int(e["args"]["bytes"]) for e in found), total / 1e6, hidden / total)


def _from_host(event: Event) -> bool:
    name = str(event.get("name"))
    return event.get("cat") == "gpu_memcpy" and "HtoD" in name and "Pinned" in name


def under(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """How much of ``spans``, added up, lies under any of ``others``."""
    union = merged(others)
    return sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in spans
        for first, last in union
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of ``spans``, as spans that do not overlap."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]
