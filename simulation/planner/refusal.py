"""Why nothing fits, and what would change that: each remedy is tried in the memory model."""

from __future__ import annotations

from dataclasses import replace

from baselines.registry import find
from simulation.planner.in_network import in_network
from simulation.planner.option import Shortfall
from simulation.planner.out_of_core import out_of_core
from simulation.planner.request import GATHERS_FOUR_BITS, Request
from simulation.planner.search import fits, shortfalls

#: Factors by which more nodes are tried, and shorter sequences.
_TIMES = (2, 4, 8, 16)
_LORA_RANK = 8


def refusal(request: Request) -> str:
    """The smallest shortfall, and what would help, for a request of which nothing fits."""
    lacks = shortfalls(request)
    ranks = request.hardware.ranks_per_node
    strategy, least = min(lacks, key=lambda pair: pair[1].of_node(ranks))
    remedies = (
        _nodes(request),
        _host_memory(request, [lack for _, lack in lacks]),
        _length(request),
        _adapters(request),
        _four_bits(request),
        _kernels(request),
        _out_of_core(request),
        _in_network(request),
    )
    found = ", or ".join(filter(None, remedies))
    return (
        f"nothing fits {request.hardware.name}: the closest, {strategy}, lacks {lacking(least)}; "
        + (f"what would help: {found}" if found else "what would help: GPUs with more memory")
    )


def lacking(lack: Shortfall) -> str:
    """A shortfall in words, in GB."""
    parts = (
        (lack.device_bytes, "GB on each device"),
        (lack.host_bytes, "GB of host memory on each node"),
    )
    return " and ".join(f"{nbytes / 1e9:.1f} {what}" for nbytes, what in parts if nbytes)


def _nodes(request: Request) -> str | None:
    hardware, batch = request.hardware, request.global_batch
    for times in _TIMES:
        nodes = times * hardware.nodes
        more = replace(
            request,
            hardware=replace(hardware, nodes=nodes),
            global_batch=None if batch is None else times * batch,
        )
        if fits(more):
            return f"{nodes} nodes"
    return None


def _host_memory(request: Request, lacks: list[Shortfall]) -> str | None:
    hosts = [lack.host_bytes for lack in lacks if lack.device_bytes == 0]
    if not hosts:
        return None
    needed = request.hardware.host_memory_bytes + min(hosts)
    return f"{needed / 1e9:.1f} GB of host memory a node"


def _length(request: Request) -> str | None:
    shortest = min(request.sequence_lengths)
    for times in _TIMES:
        length = shortest // times
        if length and fits(replace(request, sequence_lengths=(length,))):
            return f"sequences of {length} tokens"
    return None


def _adapters(request: Request) -> str | None:
    if request.lora_rank is None and fits(replace(request, lora_rank=_LORA_RANK)):
        return f"adapters in place of all parameters (--peft lora:{_LORA_RANK})"
    return None


def _four_bits(request: Request) -> str | None:
    if request.lora_rank is None or request.frozen_dtype == "nf4":
        return None
    if all(find(name).engine not in GATHERS_FOUR_BITS for name in request.strategies):
        return None
    found = fits(replace(request, frozen_dtype="nf4"))
    return "a base in four bits (--frozen-dtype nf4)" if found else None


def _kernels(request: Request) -> str | None:
    if request.kernels != "fused" and fits(replace(request, kernels="fused")):
        return "fused norms, activation functions and loss (--kernels fused)"
    return None


def _in_network(request: Request) -> str | None:
    made = in_network(request)
    return None if made is None else str(made)


def _out_of_core(request: Request) -> str | None:
    made = out_of_core(request)
    return None if made is None else str(made)
