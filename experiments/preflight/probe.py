"""Measures links, copies and compute on every rank, in the form of ``schema.Probed``."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from experiments.clusters import start_barrier
from fcdp import Topology, exchange
from fcdp.cache.memory import available_host_memory

#: Message sizes of one rank, from a flag to a transformer block, in bytes, ...
_GROWTH = 4
_SIZES = [_GROWTH**power for power in range(5, 14)]
#: ... as long as the next is expected to take no longer than this.
_LONGEST_S = 2.0
#: Number of exchanges of each size: more where they are short.
_REPEATS, _REPEATS_OF_SHORT, _SHORT_S = 3, 9, 0.02
#: Bytes per copy, and seconds that a rate is measured for.
_COPY_BYTES = 64 * 2**20
_RATE_S = 0.3
#: Rows of the square matrices that are multiplied: enough to keep the device busy.
_ROWS = {"cpu": 512}
_ROWS_ON_ACCELERATOR = 4096
_DTYPES = ("float32", "bfloat16")
#: Calls between two looks at the clock on an accelerator, which must not wait for the host.
_BURST = 8
#: The block that is timed: of a model of 7 billion parameters, or as small as on emulated nodes.
_BLOCK = {"cpu": {"width": 256, "heads": 4, "sequence_length": 128, "sequences": 2}}
_BLOCK_ON_ACCELERATOR = {"width": 4096, "heads": 32, "sequence_length": 2048, "sequences": 2}


def main(output_directory: str) -> None:
    """Measure on this rank; rank 0 writes ``probed.json``. Expects torchrun's environment."""
    output = Path(output_directory)
    topology = Topology.from_env()
    try:
        dist.barrier()
        if topology.rank == 0:
            start_barrier.wait(output)
        probed = _Probe(topology).measure()
        if topology.rank == 0:
            (output / "probed.json").write_text(json.dumps(probed, indent=1), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def line(ranks: int, samples: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The link of these (bytes, seconds): bandwidth by the largest, latency by the smallest.

    The slope is that of least squares through the largest three, as links that are limited by
    a token bucket let small messages pass at full speed.
    """
    ordered = sorted(samples)
    slope = linear_regression(*zip(*ordered[-3:], strict=True)).slope
    if slope <= 0:  # noise: the largest message still says how fast it was
        slope = ordered[-1][1] / ordered[-1][0]
    return {
        "ranks": ranks,
        "samples": [{"bytes": size, "seconds": seconds} for size, seconds in ordered],
        "latency_s": max(0.0, ordered[0][1] - ordered[0][0] * slope),
        "bytes_per_s": 1 / slope,
    }


class _Probe:
    """One rank's part of all measurements; every method is called by all ranks."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._device = torch.device(topology.mesh.device_type)

    def measure(self) -> dict[str, Any]:
        return {
            "backend": dist.get_backend(self._topology.mesh.get_group()),
            "links": self._links(),
            "host": self._host(),
            "compute": self._compute(),
        }

    def _links(self) -> dict[str, Any]:
        topology, ranks = self._topology, self._topology.ranks_per_node
        across = self._all_gather(topology.inter, senders=ranks) if topology.nodes > 1 else None
        inside = self._all_gather(topology.intra, senders=1) if ranks > 1 else None
        return {"inter_node_all_gather": across, "intra_node_all_gather": inside}

    def _all_gather(self, group: dist.ProcessGroup, senders: int) -> dict[str, Any]:
        """The link under an all-gather of ``group``, with sizes up to the longest wait.

        ``senders`` ranks share it.
        """
        samples: list[tuple[int, float]] = []
        for size in _SIZES:
            gathered = torch.zeros(group.size() * size, dtype=torch.uint8, device=self._device)

            def gather(gathered: torch.Tensor = gathered) -> None:
                exchange.wait_all(exchange.all_gather([gathered], group))
                self._synchronise()

            first = self._slowest(gather)  # makes connections and buffers, too
            repeats = _REPEATS_OF_SHORT if first < _SHORT_S else _REPEATS
            samples.append((size, median(self._slowest(gather) for _ in range(repeats))))
            if len(samples) > 1 and _GROWTH * samples[-1][1] > _LONGEST_S:
                break
        sent = (group.size() - 1) * senders
        return line(group.size(), [(size * sent, seconds) for size, seconds in samples])

    def _slowest(self, call: Callable[[], None]) -> float:
        """Seconds of a call that all ranks begin together, the slowest rank's."""
        dist.barrier()
        begin = time.perf_counter()
        call()
        seconds: float = max(self._of_all(time.perf_counter() - begin))
        return seconds

    def _host(self) -> dict[str, Any]:
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.zeros_like(source)
        to_device = from_device = None
        if self._device.type != "cpu":
            pinned = source.pin_memory()
            buffer = torch.zeros_like(source, device=self._device)
            to_device = self._rate(lambda: buffer.copy_(pinned, non_blocking=True), _COPY_BYTES)
            from_device = self._rate(lambda: pinned.copy_(buffer, non_blocking=True), _COPY_BYTES)
        return {
            "copy_bytes_per_s": self._rate(lambda: target.copy_(source), _COPY_BYTES),
            "to_device_bytes_per_s": to_device,
            "from_device_bytes_per_s": from_device,
            "free_bytes": min(self._of_all(available_host_memory() or 0)),
        }

    def _compute(self) -> dict[str, Any]:
        products = {}
        rows = _ROWS.get(self._device.type, _ROWS_ON_ACCELERATOR)
        for name in _DTYPES:
            matrix = torch.randn(rows, rows, device=self._device).to(getattr(torch, name))
            product = torch.empty_like(matrix)

            def multiply(matrix: torch.Tensor = matrix, product: torch.Tensor = product) -> object:
                return torch.mm(matrix, matrix, out=product)

            products[name] = self._rate(multiply, 2 * rows**3)
        on_cpu = self._device.type == "cpu"
        properties: Any = None if on_cpu else torch.cuda.get_device_properties(self._device)
        return {
            "device": "cpu" if on_cpu else properties.name,
            "matmul_flops_per_s": products,
            "memory_bytes": None if on_cpu else properties.total_memory,
            "one_memory": not on_cpu and bool(properties.is_integrated),
            "memory_bytes_per_s": self._memory_bytes_per_s(),
            "block": self._block(),
        }

    def _memory_bytes_per_s(self) -> float:
        """The rate of an addition in place, which reads two vectors and writes one."""
        vector = torch.zeros(_COPY_BYTES // 4, device=self._device)
        addend = torch.ones_like(vector)
        return self._rate(lambda: vector.add_(addend), 3 * _COPY_BYTES)

    def _block(self) -> dict[str, Any]:
        """Forward and backward of one transformer block, while all ranks compute."""
        shape = _BLOCK.get(self._device.type, _BLOCK_ON_ACCELERATOR)
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        block = Block(shape["width"], shape["heads"]).to(self._device, dtype)
        size = (shape["sequences"], shape["sequence_length"], shape["width"])
        inputs = torch.randn(size, device=self._device, dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(inputs)

        def there_and_back() -> None:
            block.zero_grad()
            inputs.grad = None
            block(inputs).backward(gradient)

        return {**shape, "seconds": 1 / self._rate(there_and_back, 1)}

    def _rate(self, call: Callable[[], object], amount: float) -> float:
        """``amount`` of a call per second, of the slowest rank while all work."""
        call()
        self._synchronise()
        dist.barrier()
        begin, calls = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begin) < _RATE_S:
            for _ in range(1 if self._device.type == "cpu" else _BURST):
                call()
                calls += 1
            self._synchronise()
        slowest: float = min(self._of_all(calls * amount / elapsed))
        return slowest

    def _of_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._topology.world_size
        dist.all_gather_object(values, value)
        return values

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


class Block(nn.Module):
    """A block like GPT-2's; attention, each norm and the activation are one kernel each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # x: sequences × length × width
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self._heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return x + y
