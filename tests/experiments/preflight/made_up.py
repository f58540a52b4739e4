"""Made-up measurements: round numbers that can be worked with by hand."""

from typing import Any

from experiments.preflight.schema import Compute, Host, Link, Links, Preflight, Sample


def link(bytes_per_s: float) -> Link:
    """A link without latency."""
    samples = [Sample(bytes=size, seconds=size / bytes_per_s) for size in (1000, 10**6)]
    return Link(ranks=2, samples=samples, latency_s=0.0, bytes_per_s=bytes_per_s)


def preflight(
    *, nodes: int = 2, across: float = 1e9, inside: float = 10e9, free: int = 10**12, **changes: Any
) -> Preflight:
    """Nodes of 8 ranks with a GPU each; rates in bytes and operations a second."""
    inter = None if nodes == 1 else link(across)
    flops = {"float32": 50e12, "bfloat16": 100e12}
    fields: dict[str, Any] = {
        "backend": "nccl",
        "links": Links(inter_node_all_gather=inter, intra_node_all_gather=link(inside)),
        "host": Host(
            copy_bytes_per_s=10e9,
            to_device_bytes_per_s=21e9,
            from_device_bytes_per_s=22e9,
            free_bytes=free,
        ),
        "compute": Compute(device="a GPU", matmul_flops_per_s=flops, memory_bytes=47 * 10**9),
        "evidence": "measured",
        "nodes": nodes,
        "ranks_per_node": 8,
        "inter_bandwidth_bits_per_s": None,
        "network": {"interface": "eth0"},
        "versions": {"torch": "2.13.0"},
        "hardware": {"cpu": "a processor"},
        "commit": None,
        "started_at": "2026-01-01T00:00:00+00:00",
        "seconds": 20.0,
    }
    return Preflight(**(fields | changes))
