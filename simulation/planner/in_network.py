"""LuWu beside a plan, where there is a server for it: its step, its bytes, what it needs.

Simulated by ``simulation.luwu``: a switch that sums and multicasts is taken for granted, and each
GPU is a worker, so that those of one node share its link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from simulation.hardware import Hardware
from simulation.luwu import LUWU, Server, files_bytes
from simulation.memory import largest_micro_batch
from simulation.planner.request import Request
from simulation.prediction import Prediction, fits, simulate_built, with_server
from simulation.workload import Workload


@dataclass(frozen=True)
class InNetwork:
    """A step of LuWu."""

    sequences: int
    length: int
    recomputed: float
    #: Whether frozen parameters are pulled once.
    cached: bool
    seconds: float
    tokens_per_s: float
    bottleneck: str
    #: Bytes per step of a node's link, and of the server's, by direction.
    node_received: float
    node_sent: float
    server_received: float
    server_sent: float
    device_bytes: float
    host_bytes: float
    #: Bytes of the server's files, and the server in words.
    files_bytes: float
    server: str

    def __str__(self) -> str:
        kept = f", {self.host_bytes / 1e9:,.1f} GB of host memory a node" if self.host_bytes else ""
        return (
            f"{LUWU}, whose model lies on {self.server}: {self.seconds:.3g} s per step of "
            f"{self.sequences} × {self.length} tokens a GPU ({self.tokens_per_s:,.0f} tokens/s, "
            f"waits for {_WAITS.get(self.bottleneck, self.bottleneck)}); a node receives "
            f"{self.node_received / 1e9:,.3g} GB and sends {self.node_sent / 1e9:,.3g}, the server "
            f"receives {self.server_received / 1e9:,.3g} and sends {self.server_sent / 1e9:,.3g}; "
            f"needs {self.device_bytes / 1e9:.1f} GB on each device{kept}, "
            f"{self.files_bytes / 1e9:,.0f} GB of files on the server, and a switch that sums and "
            "multicasts"
        )

    def document(self) -> dict[str, Any]:
        """For JSON; sizes in bytes, times in seconds."""
        return asdict(self)


_WAITS = {
    "compute": "computation",
    "inter_node": "what nodes send",
    "inter_node_in": "what nodes receive",
    "server_in": "what the server receives",
    "server_out": "what the server sends",
    "server_disk": "the server's drives",
    "server_cpu": "the server's optimizer",
    "host_to_device": "copies from the host",
    "device_to_host": "copies to the host",
}


def in_network(request: Request) -> InNetwork | None:
    """The fastest step of LuWu with the request's server; ``None`` without one, or if none fits.

    A step has one micro-batch, the largest that fits unless the request says its size.
    """
    server, hardware = request.server, request.hardware
    if server is None or _in_four_bits(request):
        return None
    found = [_made(point, hardware, server) for point in _points(request)]
    return max(found, key=lambda made: made.tokens_per_s, default=None)


def lack(request: Request) -> str:
    """Why ``in_network`` has no step for a request with a server, in one sentence."""
    if _in_four_bits(request):
        return "luwu does not hold frozen parameters in nf4"
    whole = request.sequences_per_rank
    sizes: tuple[int, ...] = request.micro_batches if whole is None else (whole,)
    of = f"{' or '.join(map(str, sizes))} sequences" if sizes else "one sequence"
    return f"luwu does not fit: two layers and the activations of {of} are too much"


def _in_four_bits(request: Request) -> bool:
    return request.lora_rank is not None and request.frozen_dtype == "nf4"


def _points(request: Request) -> Iterator[Workload]:
    """All that is to be tried and fits."""
    hardware, whole = request.hardware, request.sequences_per_rank
    seen = set()
    for given in request.workloads():
        point = replace(given, strategy=LUWU, policy="host", adapters="sharded", cached=False)
        shape = point.sequence_length, point.recomputed, point.checkpointing
        if shape in seen:
            continue
        seen.add(shape)
        for cached in (False,) if request.lora_rank is None else (True, False):
            tried = replace(point, cached=cached)
            sizes: tuple[int, ...] = request.micro_batches if whole is None else (whole,)
            if not sizes:
                sizes = (largest_micro_batch(tried, hardware, lambda one: fits(one, hardware)),)
            for size in sizes:
                if size and fits(replace(tried, micro_batch=size), hardware):
                    yield replace(tried, micro_batch=size)


def _made(workload: Workload, hardware: Hardware, server: Server) -> InNetwork:
    found: Prediction = simulate_built(with_server(workload, hardware, server))
    links = found.link_bytes or {}
    return InNetwork(
        sequences=workload.micro_batch,
        length=workload.sequence_length,
        recomputed=workload.recomputed,
        cached=workload.cached,
        seconds=found.step_seconds,
        tokens_per_s=found.tokens_per_s,
        bottleneck=found.bottleneck,
        node_received=links["node received"],
        node_sent=links["node sent"],
        server_received=links["server received"],
        server_sent=links["server sent"],
        device_bytes=found.footprint.device_bytes,
        host_bytes=found.footprint.host_bytes,
        files_bytes=files_bytes(workload),
        server=server.description,
    )
