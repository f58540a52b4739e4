"""The file of a preflight's figures, and the cluster that the simulator makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from experiments.records.abilities import Evidence
from experiments.records.cell import DType
from simulation import hardware
from simulation.compute import by_block, rates_of
from simulation.emulated import emulated
from simulation.files import Strict
from simulation.hardware import Hardware, Work, cluster, reserved, share_of_peak
from simulation.transformer import Transformer
from simulation.workload import Workload, block_work

#: Fields of older files: links of two ranks alone, and rates of one.
_OLDER = ("inter_node_point_to_point", "intra_node_point_to_point", "alone_matmul_flops_per_s")


class Sample(Strict):
    """A message size and its time."""

    #: Bytes that one node sends, if the link is between nodes; that one rank sends, inside a node.
    bytes: int = Field(ge=1)
    #: Median of several exchanges, of the slowest rank.
    seconds: float = Field(gt=0)


class Link(Strict):
    """An exchange at several sizes, and the line through them: latency + bytes / bandwidth."""

    ranks: int = Field(ge=2)
    samples: list[Sample] = Field(min_length=2)
    latency_s: float = Field(ge=0)
    bytes_per_s: float = Field(gt=0)


class _Part(Strict):
    """A part of the file, without fields of older files that nobody reads."""

    @model_validator(mode="before")
    @classmethod
    def _without_older(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in _OLDER}


class Links(_Part):
    """The cluster's links; ``None`` where there is one node only, or one rank per node."""

    #: All ranks at once gather from the ranks of equal local rank: the first hop of FCDP's gather.
    inter_node_all_gather: Link | None
    #: All nodes at once gather inside the node: the second hop.
    intra_node_all_gather: Link | None


class Host(Strict):
    """Rates of a rank's copies while all ranks copy, in bytes per second, each byte once."""

    copy_bytes_per_s: float = Field(gt=0)
    #: Rates from and to page-locked memory; ``None`` without an accelerator.
    to_device_bytes_per_s: float | None = Field(gt=0)
    from_device_bytes_per_s: float | None = Field(gt=0)
    #: Host memory that is free on the node that has least.
    free_bytes: int = Field(ge=0)


class TimedBlock(Strict):
    """A transformer block's sizes, the sequences that it computes at once, and its time."""

    width: int = Field(ge=1)
    heads: int = Field(ge=1)
    sequence_length: int = Field(ge=1)
    sequences: int = Field(ge=1)
    #: Forward and backward, on the slowest rank.
    seconds: float = Field(gt=0)

    def work(self) -> Work:
        """Forward and backward of all tokens in bf16, as the simulator counts them."""
        model = Transformer(
            name="block",
            family="gpt2",
            layers=1,
            width=self.width,
            heads=self.heads,
            vocabulary=1,
            mlp_width=4 * self.width,
            key_value_heads=self.heads,
            tied=True,
        )
        workload = Workload(
            strategy="ddp",
            model=model,
            sequence_length=self.sequence_length,
            micro_batch=self.sequences,
            kernels="fused",
        )
        forward, backward = block_work(workload)
        return (forward + backward) * workload.tokens


class Compute(_Part):
    """Rates of a rank's computation."""

    device: str
    #: Floating-point operations per second of matrix products, of the slowest rank while all
    #: compute: emulated nodes share their cores.
    matmul_flops_per_s: dict[DType, float]
    #: Device memory of a rank; ``None`` without an accelerator.
    memory_bytes: int | None
    #: Whether it is the host's memory, too.
    one_memory: bool = False
    #: Bytes per second that a kernel which computes next to nothing reads and writes, and the time
    #: of a block, in bf16 on accelerators. ``None`` in older files.
    memory_bytes_per_s: float | None = Field(default=None, gt=0)
    block: TimedBlock | None = None


class Probed(Strict):
    """The ranks' figures, which rank 0 writes."""

    backend: str
    links: Links
    host: Host
    compute: Compute

    @model_validator(mode="after")
    def _has_what_plans_need(self) -> Probed:
        accelerated = self.compute.memory_bytes is not None
        dtype: DType = "bfloat16" if accelerated else "float32"
        if dtype not in self.compute.matmul_flops_per_s:
            raise ValueError(f"compute.matmul_flops_per_s: {dtype} is missing")
        for name in ("to_device_bytes_per_s", "from_device_bytes_per_s"):
            if accelerated and getattr(self.host, name) is None:
                raise ValueError(f"host.{name}: is missing, and {self.compute.device} is no CPU")
        return self


class Preflight(Probed):
    """A cluster's figures, with how and when they were measured."""

    version: Literal[1] = 1
    evidence: Evidence
    nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    #: The limit of the emulated link; ``None`` where there is none.
    inter_bandwidth_bits_per_s: int | None
    network: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    commit: str | None
    started_at: str
    seconds: float

    @classmethod
    def read(cls, path: Path) -> Preflight:
        """Read a file. Raises ``ValueError`` with its name if it is not of this form."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            problem = first["msg"].removeprefix("Value error, ")
            where = ".".join(str(part) for part in first["loc"])
            message = ": ".join(filter(None, (where, problem)))
            raise ValueError(f"{path}: not a preflight of this version: {message}") from error


def hardware_of(measured: Preflight, gpu: str | None = None) -> Hardware:
    """The measured cluster: links, copies, memory and computation; the rest is the GPU's sheet.

    Computation is as much faster or slower than fitted for the GPU as one block was.

    On CPUs, where there is no data sheet, the rest is what was fitted to this project's emulated
    clusters. A link between nodes that was not measured has no limit. Raises ``ValueError`` if GPUs
    were measured and ``gpu`` does not say by which data sheet.
    """
    if measured.compute.memory_bytes is None:
        return _with_links(_of_host(measured), measured)
    if gpu is None:
        raise ValueError(
            f"gpu: is missing; {measured.compute.device} was measured, say which data sheet it has"
        )
    device = hardware.gpu(gpu)
    host = measured.host
    assert host.to_device_bytes_per_s is not None, "checked when the preflight was read"
    assert host.from_device_bytes_per_s is not None, "checked when the preflight was read"
    nominal = cluster(
        device.name,
        nodes=measured.nodes,
        ranks_per_node=measured.ranks_per_node,
        inter_bits_per_s=float("inf"),
        host_memory_bytes=float(host.free_bytes),
    )
    if (block := measured.compute.block) is not None:
        rates = by_block(device, block.work(), block.seconds)
    else:  # an older file
        rates = rates_of(device).with_products(measured.compute.matmul_flops_per_s["bfloat16"])
    calibrated = replace(
        nominal,
        name=f"{nominal.name}-measured",
        device=replace(
            device,
            memory_bytes=float(measured.compute.memory_bytes),
            memory_bytes_per_s=measured.compute.memory_bytes_per_s or device.memory_bytes_per_s,
        ),
        rates=rates,
        host_to_device_bytes_per_s=host.to_device_bytes_per_s,
        device_to_host_bytes_per_s=host.from_device_bytes_per_s,
    )
    return _with_links(reserved(calibrated), measured)


def _of_host(measured: Preflight) -> Hardware:
    # Emulated nodes are on one host; its memory and its cores are those of all their ranks.
    nodes = measured.nodes if measured.evidence == "emulated" else 1
    ranks = nodes * measured.ranks_per_node
    free = float(measured.host.free_bytes)
    nominal = emulated(measured.nodes, measured.ranks_per_node, None, memory_bytes=free / nodes)
    # Measured while all ranks computed: together they have what one device would.
    rate = ranks * measured.compute.matmul_flops_per_s["float32"]
    device = replace(nominal.device, peak_flops=rate, memory_bytes=free / ranks)
    copies = measured.host.copy_bytes_per_s
    return replace(
        nominal,
        name=f"{nominal.name}-measured",
        device=device,
        rates=share_of_peak(device, 1.0, ranks),
        host_to_device_bytes_per_s=copies,
        device_to_host_bytes_per_s=copies,
        ranks_sharing_device=ranks,
    )


def _with_links(base: Hardware, measured: Preflight) -> Hardware:
    inter, intra = measured.links.inter_node_all_gather, measured.links.intra_node_all_gather
    if inter is not None:
        latency = inter.latency_s / max(1, measured.nodes - 1)
        base = replace(base, inter_bytes_per_s=inter.bytes_per_s, inter_latency_seconds=latency)
    if intra is not None:
        latency = intra.latency_s / max(1, measured.ranks_per_node - 1)
        base = replace(base, intra_bytes_per_s=intra.bytes_per_s, intra_latency_seconds=latency)
    return base
