"""Hardware of a cluster: GPUs by the vendors' data sheets, links, host memory, disks.

Data sheets give the GPUs' figures. What no data sheet says (latencies, how much of a peak is
reached, a CPU's optimizer) has defaults that are marked as ours: measure them, if you can.

Computation is work in three parts: matrix products, attention, and bytes through memory. One share
of the peak for all of it cannot be right for every width and length: products grow with the square
of the width, attention with the length, and all else with the width. The rates of the parts are
fitted to published measurements in ``simulation.compute``; a share of the peak is one of operations
as trainers count them, and all else is taken to be part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from operator import add
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from simulation import checks
from simulation.checks import Checked, Count, NotNegative, Positive, Share
from simulation.files import Strict, rows_of, validated

Backend = Literal["nccl", "gloo"]
#: Grounds of rates: a share of the data sheet's peak, measurements of this GPU, of one of a
#: similar architecture, or matrix products, or a transformer block, that preflight measured on the
#: very nodes.
Basis = Literal[
    "share of the peak", "fitted", "nearest architecture", "preflight", "preflight's block"
]

GB = 1e9
_TERA = 1e12
_MIB = 2**20
#: Memory of CUDA's context, its libraries and NCCL's buffers, and the share that fragmentation
#: takes: ours. With them an A40 has no more than the study on imitated devices has tried.
_LIBRARIES_BYTES = 1.9e9
_FRAGMENTED = 0.05

#: Shares of a link's and a processor's peak that are reached: ours, typical of NCCL's own test
#: programs and of transformers of this size; replace them by what ``preflight`` measures.
LINK_EFFICIENCY = 0.8
MATMUL_EFFICIENCY = 0.5
#: Nodes beyond the first at which half of the greatest loss with scale is reached.
_MANY_NODES = 64


@dataclass(frozen=True)
class Fabric:
    """Fabric between nodes, as NCCL uses it: ours, where nothing was measured."""

    #: Seconds of a message: a link has half of its rate at messages of latency × rate bytes.
    latency_seconds: float
    #: Share of the nominal rate that long messages reach.
    reached: float
    #: A node's limit: sockets are served by few threads, and published runs over TCP at 40, 50 and
    #: 80 Gbit/s were all as fast as 25 Gbit/s allow.
    most_bits_per_s: float = inf


FABRICS: Mapping[str, Fabric] = {
    "tcp": Fabric(50e-6, LINK_EFFICIENCY, 25e9),
    "roce": Fabric(10e-6, 0.85),
    "infiniband": Fabric(6e-6, 0.9),
    "efa": Fabric(25e-6, 0.7),
    "unknown": Fabric(15e-6, LINK_EFFICIENCY),
}


@dataclass(frozen=True)
class Gpu(Checked):
    """One accelerator, by its data sheet."""

    name: str
    #: Dense matrix products in bf16 with fp32 accumulation (fp16 where there is no bf16).
    peak_flops: Positive
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    #: Each direction of the link to the host: PCIe's lanes after line coding.
    pcie_bytes_per_s: Positive
    #: Each direction to the other GPUs of a node. Without NVLink to all of them this is PCIe's.
    link_bytes_per_s: Positive
    #: Whether that link is PCIe, and so shares it with copies to and from the host.
    link_is_pcie: bool = False


class Card(Strict):
    """A GPU's row of ``gpus.csv``, with all that is known of it."""

    name: str = Field(min_length=1)
    tflops: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    pcie_gb_s: float = Field(default=31.5, gt=0)
    #: Without NVLink exchanges pass PCIe.
    nvlink_gb_s: float | None = Field(default=None, gt=0)
    #: Total memory as ``nvidia-smi`` reports it; data sheets round it.
    reported_mib: int
    #: Names that people type for it, beside its own.
    also: str = ""
    #: A pattern that matches the driver's name of it.
    driver: str
    #: The GPU with published runs of the nearest architecture, whose rates of computation it has.
    like: str
    #: Whether it has matrix products in fp8, at twice the rate of bf16 on all that do.
    fp8: bool = False
    #: The data sheet.
    source: str = ""

    @property
    def gpu(self) -> Gpu:
        """The accelerator in bytes and operations."""
        return Gpu(
            self.name,
            peak_flops=self.tflops * _TERA,
            memory_bytes=self.memory_gb * GB,
            memory_bytes_per_s=self.memory_gb_s * GB,
            pcie_bytes_per_s=GB * self.pcie_gb_s,
            link_bytes_per_s=GB * (self.nvlink_gb_s or self.pcie_gb_s),
            link_is_pcie=self.nvlink_gb_s is None,
        )


_TABLE = Path(__file__).with_name("gpus.csv")
#: NVIDIA's data sheets: figures "with sparsity" halved, NVLink's sum of both directions halved.
CARDS = {row["name"]: validated(Card, row, where) for where, row in rows_of(_TABLE)}


def gpu_of(model: str) -> Gpu | None:
    """The GPU that the driver calls ``model`` (``NVIDIA H200``); ``None`` for an unknown one."""
    return next((row.gpu for row in CARDS.values() if re.search(row.driver, model)), None)


def card(name: str) -> Card:
    """The GPU's row, by its name or one that people type: ``h100``, ``RTX 4090``, ``A100 80GB``.

    Raises ``ValueError`` for an unknown one: none stands in for it.
    """
    if name in CARDS:
        return CARDS[name]
    known = {_plain(each): row for row in CARDS.values() for each in (row.name, *row.also.split())}
    row = known.get(_plain(name))
    if row is None:
        checks.one_of("gpu", name, CARDS)
    assert row is not None, "all others are refused"
    return row


def _plain(name: str) -> str:
    """A GPU's name without makers, case and separators."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())


def described(text: str) -> str:
    """The table's name of a GPU; ``NAME:tflops=71,gb=24,gb_s=936`` is added to the table.

    ``pcie_gb_s`` (31.5) and ``nvlink_gb_s`` are of one direction, ``like`` is the GPU by whose
    shares it computes (a100-80gb). Raises ``ValueError`` for what is missing or not known.
    """
    with suppress(ValueError):
        return card(text).name
    name, _, pairs = text.partition(":")
    row: dict[str, Any] = dict(pair.partition("=")[::2] for pair in pairs.split(","))
    like = row.setdefault("like", "a100-80gb")
    try:
        gigabytes = float(row.pop("gb"))
        derived = {"memory_gb": gigabytes, "memory_gb_s": row.pop("gb_s"), "driver": "(?!)"}
        derived |= {"reported_mib": int(gigabytes * GB / _MIB), "fp8": CARDS[like].fp8}
        CARDS[name] = Card(name=name, **row, **derived)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"gpu = {text!r}: allowed are {', '.join(CARDS)}, and NAME:tflops=71,gb=24,gb_s=936, "
            "with pcie_gb_s, nvlink_gb_s and like"
        ) from None
    return name


def gpu(name: str) -> Gpu:
    """The GPU of this name, by its data sheet; raises as ``card``."""
    return card(name).gpu


@dataclass(frozen=True)
class Work:
    """An amount of computation, of a token or of many."""

    #: Operations as trainers count them: every token attends to all of the sequence.
    flops: float
    #: Operations of matrix products, and of attention as a causal kernel does it.
    products: float = 0.0
    attention: float = 0.0
    #: Bytes that kernels read from the device's memory and write to it.
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Work:
        return Work(*(times * part for part in vars(self).values()))


@dataclass(frozen=True, kw_only=True)
class Rates(Checked):
    """How fast a GPU computes, and how sure that is; an infinite rate takes no time."""

    #: Operations per second: as trainers count them, of matrix products, of a causal attention.
    flops_per_s: Positive = inf
    products_per_s: Positive = inf
    attention_per_s: Positive = inf
    #: Bytes per second that kernels read and write, and those that are copied beside them.
    bytes_per_s: Positive = inf
    copied_bytes_per_s: Positive = inf
    #: Rate at which bytes that are gathered or reduced take time from computation: by casts, copies
    #: into and out of buffers, and collectives' kernels.
    exchanged_bytes_per_s: Positive = inf
    #: Seconds from a kernel to the next.
    kernel_seconds: NotNegative = 0.0
    #: Share of the throughput that ever more nodes lose to one another's delays.
    lost_with_scale: Share = 0.0
    #: Factors of tokens per second between which nine of ten measurements lay.
    lowest: Positive = 1.0
    highest: Positive = 1.0
    basis: Basis = "share of the peak"
    #: The GPU that was measured, where it is another one.
    measured_on: str | None = None

    def seconds(self, work: Work) -> float:
        """Seconds of the work on one GPU of a single node."""
        return (
            work.flops / self.flops_per_s
            + work.products / self.products_per_s
            + work.attention / self.attention_per_s
            + work.nbytes / self.bytes_per_s
        )

    def slower(self, nodes: int) -> float:
        """Factor by which computation takes longer on ``nodes`` nodes."""
        return 1 / (1 - min(0.9, self.lost_with_scale * scale(nodes)))

    def with_products(self, products_per_s: float) -> Rates:
        """The rates where matrix products were measured; attention is as much faster or slower."""
        return self.faster(products_per_s / self.products_per_s, 1.0, "preflight")

    def faster(self, products: float, nbytes: float, basis: Basis) -> Rates:
        """Return the rates with products, and bytes through memory, faster by these factors.

        Attention is as much faster or slower as products are.
        """
        return replace(
            self,
            products_per_s=products * self.products_per_s,
            attention_per_s=products * self.attention_per_s,
            bytes_per_s=nbytes * self.bytes_per_s,
            copied_bytes_per_s=nbytes * self.copied_bytes_per_s,
            basis=basis,
        )


def share_of_peak(device: Gpu, share: float, sharing: int = 1) -> Rates:
    """The rates of a rank that reaches this share of the peak; ``sharing`` ranks share the device.

    Raises ``ValueError`` for what is no share above zero.
    """
    checks.share(matmul_efficiency=share)
    checks.positive(matmul_efficiency=share)
    return Rates(
        flops_per_s=device.peak_flops * share / sharing,
        copied_bytes_per_s=device.memory_bytes_per_s / sharing,
    )


def scale(nodes: int) -> float:
    """Share of the greatest loss with scale at ``nodes``: linear first, then saturating."""
    return (nodes - 1) / (nodes - 1 + _MANY_NODES)


@dataclass(frozen=True)
class Overheads:
    """Time that a host with few cores spends beside matrix products, in seconds of all its cores.

    All zero where a GPU computes: its host runs ahead, and the rates have the rest.
    """

    #: Hooks and calls of all ranks for one block in one micro-batch, by engine.
    block_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: The same for one block in an optimizer step, however many micro-batches it has.
    step_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    #: Seconds per message of an exchange: ranks wake up and hand each other the cores.
    message_seconds: float = 0.0
    #: Seconds per byte that a rank sends to another, through the kernel.
    byte_seconds: float = 0.0
    #: Seconds per byte that a rank has gathered: its memory is taken, filled and copied.
    gathered_byte_seconds: float = 0.0
    #: Seconds per byte that is kept for backward, for what is no matrix product.
    activation_byte_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Hardware(Checked):
    """A cluster: ``nodes`` × ``ranks_per_node`` devices, their links, and what each node has.

    Rates are those that are reached, not peaks; each link is full duplex. Raises ``ValueError``
    naming the field for an impossible one.
    """

    name: str
    nodes: Count
    ranks_per_node: Count
    device: Gpu
    #: How fast a rank computes while all do.
    rates: Rates
    #: Rate at which a node can send to other nodes, all its ranks together; infinite: no limit.
    inter_bytes_per_s: Positive
    #: Rate at which one rank can send inside its node.
    intra_bytes_per_s: Positive
    #: Latency of one message, as NCCL's kernels exchange it: ours.
    inter_latency_seconds: NotNegative = 15e-6
    intra_latency_seconds: NotNegative = 5e-6
    #: Rates of one rank's copies while all ranks of the node copy.
    host_to_device_bytes_per_s: Positive
    device_to_host_bytes_per_s: Positive
    #: Whether what a rank sends to other nodes passes the PCIe link that its copies use.
    nic_shares_pcie: bool = True
    #: Whether what a rank sends inside its node passes it, too.
    intra_shares_pcie: bool = False
    host_memory_bytes: Positive
    #: Rates of a node's local disks; NVMe of two drives: ours.
    disk_read_bytes_per_s: Positive = 6 * GB
    disk_write_bytes_per_s: Positive = 4 * GB
    #: NVMe drives of a server beside the nodes (LuWu's); without any it has a node's disks.
    server_drives: NotNegative = 0
    #: Rate of Adam on a node's CPUs, bound by memory: 28 bytes per element at about 110 GB/s: ours.
    cpu_adam_elements_per_s: Positive = 4e9
    #: Memory of each device for the CUDA context, NCCL's buffers and fragmentation: ours.
    device_reserve_bytes: NotNegative = 4 * GB
    #: Backend of the collectives. Gloo's reduce-scatter is an all-reduce, and one thread computes
    #: and waits.
    backend: Backend = "nccl"
    #: Number of ranks whose ``device`` is one and the same, as on an emulated cluster.
    ranks_sharing_device: Count = 1
    #: Whether these are ranks of all nodes, so that one that waits leaves the device to the others.
    nodes_share_device: bool = False
    overheads: Overheads = Overheads()

    @property
    def shape(self) -> tuple[int, int]:
        """Number of nodes, and of ranks per node."""
        return self.nodes, self.ranks_per_node

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def matmul_efficiency(self) -> float:
        """Share of the device's peak that matrix products reach (papers.md 5.2: α̂)."""
        reached = min(self.rates.flops_per_s, self.rates.products_per_s)
        return reached * self.ranks_sharing_device / self.device.peak_flops

    def seconds(self, work: Work) -> float:
        """Seconds of a rank's work while all ranks compute."""
        return self.rates.seconds(work) * self.rates.slower(self.nodes)

    @property
    def usable_device_bytes(self) -> float:
        """Device memory of a rank without the reserve."""
        return self.device.memory_bytes - self.device_reserve_bytes

    def over(self, fabric: str, oversubscription: float) -> Hardware:
        """This cluster with the fabric's latency and bandwidth, divided by ``oversubscription``.

        Raises ``ValueError`` for a fabric that is not known, and for a factor below 1.
        """
        checks.one_of("fabric", fabric, FABRICS)
        if not 1 <= oversubscription < float("inf"):
            raise ValueError(f"oversubscription = {oversubscription!r}: must be 1 or more")
        of = FABRICS[fabric]
        nominal = 8 * self.inter_bytes_per_s / LINK_EFFICIENCY
        reached = min(of.reached * nominal, of.most_bits_per_s) / 8
        return replace(
            self,
            inter_latency_seconds=of.latency_seconds,
            inter_bytes_per_s=reached / oversubscription,
        )

    def with_inter_bandwidth(self, bits_per_s: float) -> Hardware:
        """Return the same cluster with nodes that send ``bits_per_s``."""
        return replace(self, inter_bytes_per_s=bits_per_s / 8)


def cluster(
    gpu_name: str,
    *,
    nodes: int,
    ranks_per_node: int,
    inter_bits_per_s: float,
    host_memory_bytes: float = 512 * GB,
    matmul_efficiency: float = MATMUL_EFFICIENCY,
    link_efficiency: float = LINK_EFFICIENCY,
    inter_efficiency: float | None = None,
    inter_latency_seconds: float = 15e-6,
    server_drives: int = 0,
) -> Hardware:
    """A cluster of nodes with one kind of GPU, by data sheets alone.

    ``inter_bits_per_s`` is a node's nominal bandwidth, ``link_efficiency`` the share of every
    link's nominal rate that is reached, ``inter_efficiency`` that of the link between nodes where
    it is another. Raises ``ValueError`` for an unknown GPU and naming the argument that cannot be.
    """
    between = link_efficiency if inter_efficiency is None else inter_efficiency
    shares = {"link_efficiency": link_efficiency, "inter_efficiency": between}
    checks.positive(inter_bits_per_s=inter_bits_per_s, **shares)
    checks.share(**shares)
    device = gpu(gpu_name)
    pcie = link_efficiency * device.pcie_bytes_per_s
    return Hardware(
        name=f"{nodes}x{ranks_per_node}-{device.name}",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        device=device,
        rates=share_of_peak(device, matmul_efficiency),
        inter_bytes_per_s=between * inter_bits_per_s / 8,
        inter_latency_seconds=inter_latency_seconds,
        intra_bytes_per_s=link_efficiency * device.link_bytes_per_s,
        host_to_device_bytes_per_s=pcie,
        device_to_host_bytes_per_s=pcie,
        intra_shares_pcie=device.link_is_pcie,
        host_memory_bytes=host_memory_bytes,
        server_drives=server_drives,
    )


def reported(hardware: Hardware) -> Hardware:
    """The cluster whose devices have what such cards report, less what programs cannot use.

    Raises ``ValueError`` for a GPU that is not in the table.
    """
    memory = float(card(hardware.device.name).reported_mib * _MIB)
    return reserved(replace(hardware, device=replace(hardware.device, memory_bytes=memory)))


def reserved(hardware: Hardware) -> Hardware:
    """The cluster whose devices' memory was measured, less what programs cannot use."""
    reserve = _LIBRARIES_BYTES + _FRAGMENTED * hardware.device.memory_bytes
    return replace(hardware, device_reserve_bytes=reserve)
