"""A cluster as ``preflight`` has measured it, in place of what data sheets say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.costs.hardware import Hardware

if TYPE_CHECKING:
    from experiments.preflight.schema import Preflight

_CPU = "cpu"


def measured(hardware: Hardware, preflight: Preflight) -> Hardware:
    """``hardware`` with what the preflight has measured: links, and a GPU's copies and products.

    Host memory stays as it is. Raises ``ValueError`` if the GPU measured is faster than the one
    named can be.
    """
    found = hardware
    across = preflight.links.inter_node_all_gather
    if across is not None:
        found = replace(
            found,
            inter_bytes_per_s=across.bytes_per_s,
            inter_latency_seconds=across.latency_s / (preflight.nodes - 1),
        )
    inside = preflight.links.intra_node_all_gather
    if inside is not None:
        found = replace(
            found,
            intra_bytes_per_s=inside.bytes_per_s,
            intra_latency_seconds=inside.latency_s / (preflight.ranks_per_node - 1),
        )
    return found if preflight.compute.device == _CPU else _with_gpu(found, preflight)


def _with_gpu(hardware: Hardware, preflight: Preflight) -> Hardware:
    device, host, compute = hardware.device, preflight.host, preflight.compute
    if host.to_device_bytes_per_s is not None and host.from_device_bytes_per_s is not None:
        hardware = replace(
            hardware,
            host_to_device_bytes_per_s=host.to_device_bytes_per_s,
            device_to_host_bytes_per_s=host.from_device_bytes_per_s,
        )
    if compute.memory_bytes is not None:
        device = replace(device, memory_bytes=float(compute.memory_bytes))
    reached = compute.matmul_flops_per_s.get("bfloat16", hardware.flops) / device.peak_flops
    if reached > 1:
        raise ValueError(
            f"gpu = {device.name!r}: the preflight's {compute.device} reaches {reached:.1f} times "
            "its peak; allowed: the GPU that was measured"
        )
    return replace(hardware, device=device, matmul_efficiency=reached)
