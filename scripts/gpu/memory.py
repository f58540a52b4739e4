"""Device memory of one of 16 ranks whose host runs ahead of its GPU: FSDP2, no cache, host cache.

What the device still reads cannot be reused, so memory shows what is in flight: with a GPU that is
slower than the host a library that holds gathered units too long grows towards the whole model.
The other ranks are imitated; the device, its streams and its allocator are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fcdp
from scripts.gpu import fake, groups
from scripts.gpu.rank import Rank
from scripts.gpu.records import NOT_ON_CPU, Brief, Deadline, Record

NODES, RANKS_PER_NODE = 2, 8
ENGINES = ("fsdp2", "none", "host")
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


def sizes(small: bool) -> dict[str, int]:
    """Square units of ``width``² values in bf16: 24 of 200 MB."""
    if small:
        return {"units": 4, "width": 64, "products": 1, "tokens": 8}
    # One product of 8,192 rows takes some 2.5 ms: a unit keeps the GPU busy for ten.
    return {"units": 24, "width": 10_000, "products": 4, "tokens": 8192}


def allowed(width: int) -> int:
    """Bytes by which a cache may exceed FSDP2: slices, each in segments of the allocator."""
    slice_bytes = 2 * width * width // RANKS_PER_NODE
    return _SLICES * -(-slice_bytes // _SEGMENT) * _SEGMENT + _SMALL


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    deadline, size = Deadline(limit_s), sizes(brief.small)
    found: dict[str, dict[str, Any]] = {}
    for index, engine in enumerate(ENGINES):
        outcome = groups.run(
            "memory",
            {"engine": engine, **size},
            world_size=1,
            device=brief.device,
            limit_s=deadline.left() / (len(ENGINES) - index),
        )
        if outcome.state != "ended":
            record.failed(f"{engine}: steps", "\n".join([str(outcome), *outcome.stacks]))
        elif outcome.lines[0]:
            found[engine] = outcome.lines[0][0]
            served = engine != "host" or found[engine]["hits"] > 0
            record.passed_if(served, f"{engine}: steps", "" if served else "the cache served none")
    record.details = {"sizes": size, "world": f"{NODES} × {RANKS_PER_NODE}", **found}
    judge(record, found, size["width"])


def judge(record: Record, found: dict[str, dict[str, Any]], width: int) -> None:
    """Compare the engines' peaks with FSDP2's."""
    record.details["allowed_bytes"] = allowed(width)
    if any("not_measured" in each for each in found.values()):
        record.not_measured("device memory", NOT_ON_CPU)
        return
    for engine in found:
        record.figures[f"{engine} active/reserved GB"] = "{:.2f}/{:.2f}".format(
            found[engine]["active_peak"] / 1e9, found[engine]["reserved_peak"] / 1e9
        )
    if "fsdp2" not in found:
        return
    for engine in ("none", "host"):
        if engine not in found:
            continue
        for name in _STATISTICS:
            more = found[engine][name] - found["fsdp2"][name]
            record.details[f"{engine}_minus_fsdp2_{name}"] = more
            if name != "allocated_peak":
                record.passed_if(
                    more <= allowed(width),
                    f"{engine}: {name} exceeds FSDP2's by slices in flight at most",
                    f"{more / 1e6:.1f} MB more, {allowed(width) / 1e6:.1f} MB allowed",
                )
        record.passed_if(
            found[engine]["retries"] <= found["fsdp2"]["retries"],
            f"{engine}: the allocator tries again no more often than with FSDP2",
            f"{found[engine]['retries']} times",
        )
    ahead = found["fsdp2"]["host_seconds"] / found["fsdp2"]["device_seconds"]
    record.figures["host/device time of a forward"] = ahead
    record.passed_if(
        ahead < 0.5, "the GPU bounds the forward: its host ran ahead", f"{ahead:.2f} of the time"
    )


class _Busy(nn.Module):
    """A unit that keeps the GPU busy for long and takes little memory but its weight."""

    def __init__(self, size: dict[str, int], scratch: tuple[torch.Tensor, torch.Tensor]) -> None:
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


def on_this_rank(rank: Rank) -> None:
    with fake.world(NODES, RANKS_PER_NODE, rank.device.type) as topology:
        rank.answer(_peaks(rank, topology))


def _peaks(rank: Rank, topology: fcdp.Topology) -> dict[str, Any]:
    size = {name: int(rank.brief[name]) for name in sizes(small=True)}
    device = rank.device
    rows = (size["tokens"], size["width"])
    scratch = (
        torch.randn(rows, dtype=torch.bfloat16, device=device),
        torch.empty(rows, dtype=torch.bfloat16, device=device),
    )
    model = nn.Sequential(*(_Busy(size, scratch) for _ in range(size["units"])))
    _shard(model, topology, rank.brief["engine"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(8, size["width"], dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        for _ in range(_STEPS):
            _step(model, optimizer, x, device)
        found: dict[str, Any] = {"not_measured": NOT_ON_CPU}
    else:
        found = _on_the_device(lambda: _step(model, optimizer, x, device), device)
    found["hits"] = None if rank.brief["engine"] == "fsdp2" else fcdp.ledger(model).hits
    return found


def _shard(model: nn.Sequential, topology: fcdp.Topology, engine: str) -> None:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if engine == "fsdp2":
        for module in [*model, model]:
            fully_shard(module, mesh=topology.mesh, mp_policy=precision)
    else:
        policy = fcdp.HostCache() if engine == "host" else fcdp.NoCache()
        fcdp.shard(
            model,
            topology,
            units=model,
            policy=policy,
            mp_policy=precision,
            look_ahead=LOOK_AHEAD,
        )


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Forward, backward and step; the forward's seconds on the host and on the device."""
    if device.type == "cpu":
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return 0.0, 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    started = time.perf_counter()
    loss = model(x).float().square().mean()
    host = time.perf_counter() - started
    end.record()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return host, begin.elapsed_time(end) / 1e3


def _on_the_device(step: Callable[[], tuple[float, float]], device: torch.device) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what sharding left
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    seconds = [step() for _ in range(_STEPS)]
    statistics = torch.cuda.memory_stats(device)
    found = {name: statistics[key] for name, key in _STATISTICS.items()}
    # The first forward also loads kernels.
    host, on_device = seconds[-1]
    return {
        **found,
        "retries": statistics.get("num_alloc_retries", 0) - before,
        "host_seconds": host,
        "device_seconds": on_device,
    }
