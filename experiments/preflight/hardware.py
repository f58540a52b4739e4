"""A cluster as the simulator sees it, from what preflight measured there."""

from __future__ import annotations

from dataclasses import replace

from experiments.preflight.schema import Compute, Link, Preflight
from simulation.compute.study import by_block, rates_of
from simulation.emulated import emulated
from simulation.hardware import Gpu, Hardware, cluster, reserved
from simulation.rates import Rates


def hardware_of(measured: Preflight, device: Gpu | None = None) -> Hardware:
    """The measured cluster: links, copies, memory and computation; the rest is ``device``'s sheet.

    Computation is as much faster or slower than fitted for ``device`` as one block was.

    On CPUs, where there is no data sheet, the rest is what was fitted to this project's emulated
    clusters. A link between nodes that was not measured has no limit. Raises ``ValueError`` if GPUs
    were measured and ``device`` is not given.
    """
    if measured.compute.memory_bytes is None:
        return _with_links(_of_host(measured), measured)
    if device is None:
        raise ValueError(
            f"gpu: is missing; {measured.compute.device} was measured, say which data sheet it has"
        )
    rates = measured.compute.matmul_flops_per_s
    host = measured.host
    assert host.to_device_bytes_per_s is not None, "checked when the preflight was read"
    assert host.from_device_bytes_per_s is not None, "checked when the preflight was read"
    nominal = cluster(
        device.name,
        nodes=measured.nodes,
        ranks_per_node=measured.ranks_per_node,
        inter_bits_per_s=float("inf"),
        host_memory_bytes=float(host.free_bytes),
        matmul_efficiency=min(1.0, rates["bfloat16"] / device.peak_flops),
    )
    found = replace(
        nominal,
        name=f"{nominal.name}-measured",
        device=replace(
            device,
            memory_bytes=float(measured.compute.memory_bytes),
            memory_bytes_per_s=measured.compute.memory_bytes_per_s or device.memory_bytes_per_s,
        ),
        rates=_rates(measured.compute, device),
        host_to_device_bytes_per_s=host.to_device_bytes_per_s,
        device_to_host_bytes_per_s=host.from_device_bytes_per_s,
    )
    return _with_links(reserved(found), measured)


def _rates(measured: Compute, device: Gpu) -> Rates:
    """The device's, by the block that was timed; in older files, by the matrix product."""
    block = measured.block
    if block is None:
        return rates_of(device).with_products(measured.matmul_flops_per_s["bfloat16"])
    return by_block(device, block.work(), block.seconds)


def _of_host(measured: Preflight) -> Hardware:
    # Emulated nodes are on one host; its memory and its cores are those of all their ranks.
    nodes = measured.nodes if measured.evidence == "emulated" else 1
    ranks = nodes * measured.ranks_per_node
    free = float(measured.host.free_bytes)
    found = emulated(measured.nodes, measured.ranks_per_node, None, memory_bytes=free / nodes)
    # Measured while all ranks computed: together they have what one device would.
    rate = ranks * measured.compute.matmul_flops_per_s["float32"]
    copies = measured.host.copy_bytes_per_s
    return replace(
        found,
        name=f"{found.name}-measured",
        device=replace(found.device, peak_flops=rate, memory_bytes=free / ranks),
        host_to_device_bytes_per_s=copies,
        device_to_host_bytes_per_s=copies,
        ranks_sharing_device=ranks,
    )


def _with_links(found: Hardware, measured: Preflight) -> Hardware:
    links = measured.links
    inter: Link | None = links.inter_node_all_gather
    intra: Link | None = links.intra_node_all_gather
    if inter is not None:
        found = replace(
            found,
            inter_bytes_per_s=inter.bytes_per_s,
            inter_latency_seconds=inter.latency_s / max(1, measured.nodes - 1),
        )
    if intra is not None:
        found = replace(
            found,
            intra_bytes_per_s=intra.bytes_per_s,
            intra_latency_seconds=intra.latency_s / max(1, measured.ranks_per_node - 1),
        )
    return found
