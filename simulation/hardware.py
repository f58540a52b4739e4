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
from dataclasses import dataclass, field, replace
from math import inf, log2
from types import MappingProxyType
from typing import Literal

from simulation import checks
from simulation.checks import Checked, Count, NotNegative, Positive, Share

Backend = Literal["nccl", "gloo"]
#: What rates rest on: a share of the data sheet's peak, measurements of this GPU, of one of a
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
#: One direction of 16 lanes, by PCIe generation, after line coding.
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75 * GB, 31.5 * GB, 63.0 * GB

#: Shares of a link's and a processor's peak that are reached: ours, typical of NCCL's own test
#: programs and of transformers of this size; replace them by what ``preflight`` measures.
LINK_EFFICIENCY = 0.8
MATMUL_EFFICIENCY = 0.5
#: Nodes at which what is lost with scale turns from linear to logarithmic.
_MANY_NODES = 32


#: Seconds of a message between nodes by fabric, as NCCL exchanges it: ours. With them a link has
#: half of its rate at messages of latency × rate bytes, and all of it at long ones.
FABRICS: Mapping[str, float] = MappingProxyType(
    {"tcp": 50e-6, "roce": 10e-6, "infiniband": 6e-6, "unknown": 15e-6}
)


@dataclass(frozen=True)
class Gpu(Checked):
    """One accelerator, by its data sheet."""

    name: str
    #: Dense matrix products in bf16 with fp32 accumulation (fp16 where there is no bf16).
    peak_flops: Positive
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    #: Each direction of the link to the host.
    pcie_bytes_per_s: Positive
    #: Each direction to the other GPUs of a node. Without NVLink to all of them this is PCIe's.
    link_bytes_per_s: Positive
    #: Whether that link is PCIe, and so shares it with copies to and from the host.
    link_is_pcie: bool = False


def _pcie_gpu(name: str, tera: float, memory_gb: float, memory_gb_s: float, pcie: float) -> Gpu:
    memory, rate = memory_gb * GB, memory_gb_s * GB
    return Gpu(name, tera * _TERA, memory, rate, pcie, pcie, link_is_pcie=True)


@dataclass(frozen=True)
class Card:
    """All that is known of a GPU: a row of the one table that there is of them."""

    gpu: Gpu
    #: Total memory as ``nvidia-smi`` reports it; data sheets round it.
    reported_mib: int
    #: The pattern of what the driver calls it.
    driver: str
    #: The GPU with published runs whose architecture is nearest: by it the rates of computation.
    like: str
    #: Nominal bandwidth of nodes with it, as they usually have it.
    node_bits_per_s: float = 1.6e12


_A100, _H100 = "a100-80gb", "h100-sxm"
# NVIDIA's data sheets; figures "with sparsity" halved, NVLink's sum of both directions halved.
CARDS: dict[str, Card] = {
    card.gpu.name: card
    for card in (
        # A40 data sheet. NVLink joins pairs only (56 GB/s): rings over 4 or 8 cross PCIe.
        Card(_pcie_gpu("a40", 149.7, 48, 696, _PCIE_4), 46_068, r"A40$", _A100),
        # A100 data sheet: SXM, NVLink 600 GB/s in both directions.
        Card(
            Gpu("a100-40gb", 312 * _TERA, 40 * GB, 1555 * GB, _PCIE_4, 300 * GB),
            40_960,
            r"A100(?!.*80GB)",
            "a100-40gb",
        ),
        Card(
            Gpu(_A100, 312 * _TERA, 80 * GB, 2039 * GB, _PCIE_4, 300 * GB),
            81_920,
            r"A100.*80GB",
            _A100,
        ),
        # H100 data sheet: NVLink 900 GB/s; PCIe 600 GB/s, but between pairs only.
        Card(
            Gpu(_H100, 989.4 * _TERA, 80 * GB, 3350 * GB, _PCIE_5, 450 * GB),
            81_559,
            r"H100(?! PCIe)",
            _H100,
            node_bits_per_s=3.2e12,
        ),
        Card(_pcie_gpu("h100-pcie", 756, 80, 2000, _PCIE_5), 81_559, r"H100 PCIe", _H100),
        # H200 data sheet: the H100's processor.
        Card(
            Gpu("h200", 989.4 * _TERA, 141 * GB, 4800 * GB, _PCIE_5, 450 * GB),
            143_771,
            r"H200",
            _H100,
        ),
        # HGX B200 data sheet: NVLink 1,800 GB/s in both directions.
        Card(
            Gpu("b200", 2250 * _TERA, 180 * GB, 7700 * GB, _PCIE_5, 900 * GB),
            183_359,
            r"B200",
            _H100,
        ),
        # L40S, L4 and RTX 4090 (Ada white paper) have no NVLink.
        Card(_pcie_gpu("l40s", 362.05, 48, 864, _PCIE_4), 46_068, r"L40S", _A100),
        Card(_pcie_gpu("l4", 121, 24, 300, _PCIE_4 / 2), 23_034, r"L4$", _A100),  # 8 lanes
        Card(_pcie_gpu("rtx4090", 165.2, 24, 1008, _PCIE_4), 24_564, r"RTX 4090$", _A100),
        # A10 data sheet; A10G is AWS's variant with less of the tensor cores.
        Card(_pcie_gpu("a10", 125, 24, 600, _PCIE_4), 23_028, r"A10$", _A100),
        Card(_pcie_gpu("a10g", 70, 24, 600, _PCIE_4), 23_028, r"A10G", _A100),
        # V100 SXM2 data sheet: fp16, there is no bf16; NVLink 300 GB/s.
        Card(
            Gpu("v100-16gb", 125 * _TERA, 16 * GB, 900 * GB, _PCIE_3, 150 * GB),
            16_384,
            r"V100.*16GB",
            _A100,
        ),
        Card(
            Gpu("v100-32gb", 125 * _TERA, 32 * GB, 900 * GB, _PCIE_3, 150 * GB),
            32_768,
            r"V100.*32GB",
            _A100,
        ),
    )
}


def gpu_of(model: str) -> Gpu | None:
    """The GPU that the driver calls ``model`` (``NVIDIA H200``); ``None`` for an unknown one."""
    return next((one.gpu for one in CARDS.values() if re.search(one.driver, model)), None)


def card(name: str) -> Card:
    """The GPU's row. Raises ``ValueError`` for an unknown one: none stands in for it."""
    try:
        return CARDS[name]
    except KeyError:
        raise ValueError(f"gpu = {name!r}: allowed are {', '.join(CARDS)}") from None


def gpu(name: str) -> Gpu:
    """The GPU of this name, by its data sheet; raises as ``card``."""
    return card(name).gpu


@dataclass(frozen=True)
class Work:
    """Computation, of a token or of many."""

    #: Operations as trainers count them: every token attends to all of the sequence.
    flops: float
    #: Operations of matrix products, and of attention as a causal kernel does it.
    products: float = 0.0
    attention: float = 0.0
    #: Bytes that kernels read from the device's memory and write to it.
    nbytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.products + other.products,
            self.attention + other.attention,
            self.nbytes + other.nbytes,
        )

    def __mul__(self, times: float) -> Work:
        return Work(
            times * self.flops,
            times * self.products,
            times * self.attention,
            times * self.nbytes,
        )


@dataclass(frozen=True, kw_only=True)
class Rates(Checked):
    """How fast a GPU computes, and how sure that is; what is infinite takes no time."""

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
    #: Share of the throughput that ``_MANY_NODES`` nodes more lose to one another's delays.
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
        """Factor of the time of computation on so many nodes."""
        return 1 / (1 - min(0.9, self.lost_with_scale * scale(nodes)))

    def with_products(self, products_per_s: float) -> Rates:
        """The rates where matrix products were measured; attention is as much faster or slower."""
        times = products_per_s / self.products_per_s
        return replace(
            self,
            products_per_s=products_per_s,
            attention_per_s=times * self.attention_per_s,
            basis="preflight",
        )

    def with_block(self, work: Work, seconds: float) -> Rates:
        """The rates where a block was measured: all parts are as much faster or slower."""
        times = self.seconds(work) / seconds
        return replace(
            self,
            products_per_s=times * self.products_per_s,
            attention_per_s=times * self.attention_per_s,
            bytes_per_s=times * self.bytes_per_s,
            copied_bytes_per_s=times * self.copied_bytes_per_s,
            basis="preflight's block",
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
    """How far ``nodes`` are from one: linear up to ``_MANY_NODES``, then logarithmic."""
    return log2(1 + (nodes - 1) / _MANY_NODES)


@dataclass(frozen=True)
class Overheads:
    """Time that a host with few cores spends beside matrix products, in seconds of all its cores.

    All zero where a GPU computes: its host runs ahead, and the rates have the rest.
    """

    #: Hooks and calls of all ranks for one block in one micro-batch, by engine.
    block_seconds: Mapping[str, float] = field(default_factory=dict)
    #: The same for one block in an optimizer step, however many micro-batches it has.
    step_seconds: Mapping[str, float] = field(default_factory=dict)
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
    #: Rate of Adam on a node's CPUs, bound by memory: 28 bytes per element at about 110 GB/s: ours.
    cpu_adam_elements_per_s: Positive = 4e9
    #: Memory of each device for the CUDA context, NCCL's buffers and fragmentation: ours.
    device_reserve_bytes: NotNegative = 4 * GB
    #: What carries the collectives. Gloo's reduce-scatter is an all-reduce, and one thread computes
    #: and waits.
    backend: Backend = "nccl"
    #: Number of ranks whose ``device`` is one and the same, as on an emulated cluster.
    ranks_sharing_device: Count = 1
    overheads: Overheads = Overheads()

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
        """The same cluster over this fabric, of whose bandwidth nodes share so many times as much.

        Raises ``ValueError`` for a fabric that is not known, and for a factor below 1.
        """
        if fabric not in FABRICS:
            raise ValueError(f"fabric = {fabric!r}: allowed are {', '.join(FABRICS)}")
        if not 1 <= oversubscription < float("inf"):
            raise ValueError(f"oversubscription = {oversubscription!r}: must be 1 or more")
        return replace(
            self,
            inter_latency_seconds=FABRICS[fabric],
            inter_bytes_per_s=self.inter_bytes_per_s / oversubscription,
        )

    def with_inter_bandwidth(self, bits_per_s: float | None) -> Hardware:
        """The same cluster whose nodes send so many bits per second; ``None``: no limit."""
        rate = float("inf") if bits_per_s is None else bits_per_s / 8
        return replace(self, inter_bytes_per_s=rate)


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
) -> Hardware:
    """A cluster of nodes with one kind of GPU, of which only the data sheets are known.

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
        name=f"{nodes}x{ranks_per_node}-{gpu_name}",
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
