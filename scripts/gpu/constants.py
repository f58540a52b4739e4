"""Preflight's constants of this machine, in preflight's file format, for the planner.

``experiments preflight`` needs pydantic and agents on nodes; this measures the same quantities with
torch alone, and beside them what the planner does not ask for: the device's memory bandwidth, and
copies in both directions at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from scripts.gpu import groups, records
from scripts.gpu.rank import Rank
from scripts.gpu.records import NOT_ON_CPU, Brief, Record

FILE = "preflight.json"
_DTYPES = ("float32", "bfloat16")
#: Bytes of a copy, rows of a square matrix and seconds of a measurement, as preflight has them.
_COPY_BYTES = 64 * 2**20
_ROWS = {"cuda": 4096, "cpu": 512}
_RATE_S = 0.3
#: Calls between two looks at the clock on an accelerator.
_BURST = 8
#: Message sizes of a rank, and exchanges of each.
_SIZES, _EXCHANGES = [4**power for power in range(7, 14)], 5


def measure(brief: Brief, record: Record, limit_s: float) -> None:
    """Measure on all GPUs of this machine, or on two ranks of its CPUs."""
    started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    ranks = 2 if brief.device == "cpu" else torch.cuda.device_count()
    outcome = groups.run(
        "constants", {"small": brief.small}, world_size=ranks, device=brief.device, limit_s=limit_s
    )
    if outcome.state != "ended" or not outcome.lines[0]:
        record.failed("measurements", "\n".join([str(outcome), *outcome.stacks]))
        return
    probed = dict(outcome.lines[0][0])
    beside = probed.pop("beside")
    origin = records.origin(brief.device, None)
    content = {
        **probed,
        "version": 1,
        "evidence": "measured",
        "nodes": 1,
        "ranks_per_node": ranks,
        "inter_bandwidth_bits_per_s": None,
        "network": {},
        "versions": origin["versions"],
        "hardware": origin["hardware"] | beside,
        "commit": origin["commit"],
        "started_at": started_at,
        "seconds": outcome.seconds,
    }
    records.write(brief.out / FILE, content)
    judge(record, probed, beside, brief.device == "cpu")


def judge(record: Record, probed: dict[str, Any], beside: dict[str, Any], on_cpu: bool) -> None:
    rates = probed["compute"]["matmul_flops_per_s"]
    for name, rate in rates.items():
        record.figures[f"{name} TFLOP/s"] = rate / 1e12
    for name, rate in probed["host"].items():
        if rate is not None and name.endswith("per_s"):
            record.figures[f"{name.removesuffix('_bytes_per_s')} GB/s"] = rate / 1e9
    for name, rate in beside.items():
        record.figures[f"{name.removesuffix('_bytes_per_s')} GB/s"] = rate / 1e9
    record.passed_if(all(rate > 0 for rate in rates.values()), "matrix products")
    if on_cpu:
        record.not_measured("copies to and from a device, and its memory", NOT_ON_CPU)
    if probed["links"]["intra_node_all_gather"] is None:
        record.not_measured("collectives inside the node", "there is one GPU")
    else:
        record.passed_if(True, "collectives inside the node")


def on_this_rank(rank: Rank) -> None:
    probe = _Probe(rank)
    found = {
        "backend": "gloo" if rank.device.type == "cpu" else "nccl",
        "links": {
            "inter_node_point_to_point": None,
            "inter_node_all_gather": None,
            "intra_node_point_to_point": probe.point_to_point(),
            "intra_node_all_gather": probe.all_gather(),
        },
        "host": probe.host(),
        "compute": probe.compute(),
        "beside": probe.beside(),
    }
    rank.answer(found)


def line_through(ranks: int, samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Latency and bandwidth, as ``experiments.preflight.schema.Link`` fits them.

    The slope is that of least squares through the largest three samples of (bytes, seconds), the
    latency what the smallest takes beyond its bytes.
    """
    largest = sorted(samples)[-3:]
    across, up = mean(size for size, _ in largest), mean(s for _, s in largest)
    spread = sum((size - across) ** 2 for size, _ in largest)
    slope = sum((size - across) * (s - up) for size, s in largest) / spread
    if slope <= 0:  # noise: the largest message still says how fast it was
        slope = largest[-1][1] / largest[-1][0]
    size, s = min(samples)
    return {
        "ranks": ranks,
        "samples": [{"bytes": size, "seconds": s} for size, s in sorted(samples)],
        "latency_s": max(0.0, s - size * slope),
        "bytes_per_s": 1 / slope,
    }


def _free_host_memory() -> int:
    """What the kernel says is available, caches that it would give up included."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


class _Probe:
    """One rank's part; every method is called by all ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._device = rank.device
        self._on_cpu = rank.device.type == "cpu"
        self._seconds = 0.05 if rank.brief["small"] else _RATE_S
        self._sizes = _SIZES[:3] if rank.brief["small"] else _SIZES
        self._copy_bytes = _COPY_BYTES // (16 if rank.brief["small"] else 1)

    def all_gather(self) -> dict[str, Any] | None:
        """Every rank sends its part to the others."""
        world = self._rank.world_size
        if world == 1:
            return None

        def call_of(size: int) -> Callable[[], object]:
            parts = [torch.zeros(size, dtype=torch.uint8, device=self._device)] * world
            gathered = [torch.empty_like(part) for part in parts]
            return lambda: dist.all_gather(gathered, parts[0])

        samples = self._samples(call_of)
        return line_through(world, [(size * (world - 1), s) for size, s in samples])

    def point_to_point(self) -> dict[str, Any] | None:
        """Rank 0 to rank 1 and back, halved."""
        if self._rank.world_size == 1:
            return None
        me = self._rank.rank

        def call_of(size: int) -> Callable[[], object]:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)

            def there_and_back() -> None:
                for sender in (0, 1) if me < 2 else ():
                    if me == sender:
                        dist.send(buffer, 1 - me)
                    else:
                        dist.recv(buffer, 1 - me)

            return there_and_back

        return line_through(2, [(size, s / 2) for size, s in self._samples(call_of)])

    def host(self) -> dict[str, Any]:
        source = torch.ones(self._copy_bytes, dtype=torch.uint8)
        target = torch.zeros_like(source)
        to_device = from_device = None
        if not self._on_cpu:
            pinned = source.pin_memory()
            there = torch.empty_like(source, device=self._device)
            to_device = self._rate(lambda: there.copy_(pinned, non_blocking=True))
            from_device = self._rate(lambda: pinned.copy_(there, non_blocking=True))
        return {
            "copy_bytes_per_s": self._rate(lambda: target.copy_(source)),
            "to_device_bytes_per_s": to_device,
            "from_device_bytes_per_s": from_device,
            "free_bytes": int(min(self._of_all(_free_host_memory()))),
        }

    def compute(self) -> dict[str, Any]:
        together, alone = {}, {}
        rows = _ROWS[self._device.type] // (4 if self._rank.brief["small"] else 1)
        for name in _DTYPES:
            matrix = torch.randn(rows, rows, device=self._device).to(getattr(torch, name))
            product = torch.empty_like(matrix)

            def multiply(matrix: torch.Tensor = matrix, product: torch.Tensor = product) -> object:
                return torch.mm(matrix, matrix, out=product)

            together[name] = self._rate(multiply, 2 * rows**3)
            alone[name] = self._rate(multiply, 2 * rows**3, alone=True)
        properties: Any = None if self._on_cpu else torch.cuda.get_device_properties(self._device)
        return {
            "device": "cpu" if self._on_cpu else properties.name,
            "matmul_flops_per_s": together,
            "alone_matmul_flops_per_s": alone,
            "memory_bytes": None if self._on_cpu else properties.total_memory,
        }

    def beside(self) -> dict[str, float]:
        """Bytes read and written in the device's memory, and copies both ways, each way's bytes."""
        if self._on_cpu:
            return {}
        pinned = [torch.ones(_COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        there = [torch.empty_like(each, device=self._device) for each in pinned]
        large = [torch.ones(2**30, dtype=torch.uint8, device=self._device) for _ in range(2)]
        streams = [torch.cuda.Stream(self._device) for _ in range(2)]

        def both_ways() -> None:
            with torch.cuda.stream(streams[0]):
                there[0].copy_(pinned[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                pinned[1].copy_(there[1], non_blocking=True)

        return {
            "device_memory_bytes_per_s": self._rate(lambda: large[0].copy_(large[1]), 2 * 2**30),
            "both_ways_bytes_per_s": self._rate(both_ways, _COPY_BYTES),
        }

    def _samples(self, call_of: Callable[[int], Callable[[], object]]) -> list[tuple[int, float]]:
        samples = []
        for size in self._sizes:
            call = call_of(size)
            self._slowest(call)  # makes connections and buffers, too
            samples.append((size, median(self._slowest(call) for _ in range(_EXCHANGES))))
        return samples

    def _slowest(self, call: Callable[[], object]) -> float:
        """Seconds of a call that all ranks begin together, the slowest rank's."""
        self._meet()
        begin = time.perf_counter()
        call()
        self._synchronise()
        seconds: float = max(self._of_all(time.perf_counter() - begin))
        return seconds

    def _rate(
        self, call: Callable[[], object], amount: float | None = None, *, alone: bool = False
    ) -> float:
        """``amount`` of a call (a copy's bytes), a second: the slowest rank's, or rank 0's."""
        amount = self._copy_bytes if amount is None else amount
        self._meet()
        rate = float("inf")
        if not alone or self._rank.rank == 0:
            call()
            self._synchronise()
            begin, calls = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begin) < self._seconds:
                for _ in range(1 if self._on_cpu else _BURST):
                    call()
                    calls += 1
                self._synchronise()
            rate = calls * amount / elapsed
        slowest: float = min(self._of_all(rate))
        return slowest

    def _meet(self) -> None:
        if self._rank.world_size > 1:
            dist.all_reduce(torch.zeros(1))  # on the host, whatever the device

    def _of_all(self, value: float) -> list[float]:
        if self._rank.world_size == 1:
            return [value]
        own = torch.tensor([value], dtype=torch.float64)
        values = [torch.empty_like(own) for _ in range(self._rank.world_size)]
        dist.all_gather(values, own)
        return [each.item() for each in values]

    def _synchronise(self) -> None:
        if not self._on_cpu:
            torch.cuda.synchronize()
