"""The equations of docs/memory.md, as functions; tests compare them with what fcdp allocates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fcdp
from analysis import text
from fcdp.arena import aligned
from fcdp.cache.named import parse
from fcdp.grouping import PartialsChoice
from simulation import models
from simulation.models import PAPER_MODELS, SEQUENCE_LENGTH
from simulation.pipeline import equal_tokens
from simulation.transformer import Transformer

GB = 1e9


@dataclass(eq=False)
class Unit:
    """Sizes of a unit that the equations need; ``fcdp.unit.Unit`` has them too."""

    name: str
    #: One rank's part of the gather, in bytes of the gather dtype.
    shard_bytes: int
    #: Elements of that part.
    shard_numel: int
    trainable: bool = True
    reuses: int = 1
    #: The nodes that it is on, which policies ask for.
    topology: Any = None


@dataclass(frozen=True)
class Cluster:
    """Nodes and ranks, as a policy asks for them."""

    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class Memory:
    """Bytes that the cache of one rank takes."""

    #: Entries on the device; where the policy decides by memory in use, the most there can be.
    device: int
    #: Bytes that the allocator holds for gathers' slices on the device (accelerators only).
    slices: int
    #: The arena and the disk's buffers, page-locked on CUDA.
    host: int
    #: The file.
    disk: int


def cache(
    policy: fcdp.CachePolicy, units: Sequence[Any], cluster: Any, look_ahead: int = 1
) -> Memory:
    """Bytes that ``policy`` takes on one rank of ``cluster``."""
    placement = policy.place(units, cluster)
    others = cluster.nodes - 1
    size = {unit: others * unit.shard_bytes for unit in units if others}
    device, host, disk = 0, [], []
    for unit in size:
        preference = placement.preferences[unit]
        if "device" in preference:
            device += size[unit]
        if "host" in preference and (placement.guarded or "device" not in preference):
            host.append(size[unit])
        if "disk" in preference:
            disk.append(aligned(size[unit]))
    return Memory(
        device=device,
        slices=slices(units, cluster) + _read(size, placement, host, cluster, look_ahead),
        host=sum(map(aligned, host)) + (look_ahead + 2) * max(disk, default=0),
        disk=sum(disk),
    )


def slices(units: Sequence[Any], cluster: Any) -> int:
    """Device memory that gathers across nodes take beyond FSDP2's, in bytes (accelerators only).

    One slice is filled while the one before it is read. With one rank per node these are FSDP2's
    own outputs, of which one more is kept.
    """
    if cluster.nodes == 1:
        return 0
    buffers = 1 if cluster.ranks_per_node == 1 else 2
    return buffers * cluster.nodes * max(unit.shard_bytes for unit in units)


def _read(
    size: dict[Any, int], placement: Any, host: list[int], cluster: Any, look_ahead: int
) -> int:
    """Slices from the cache: the one that is read, and those that are fetched ahead."""
    ahead = look_ahead * max(host, default=0)
    if cluster.ranks_per_node == 1:  # what was not fetched ahead goes into FSDP2's output
        return ahead + max(host, default=0) if ahead else 0
    cached = (each for unit, each in size.items() if placement.preferences[unit])
    return max(cached, default=0) + ahead


def reduction_buffer(units: Sequence[Any], cluster: Any, itemsize: int) -> int:
    """Bytes of a second input buffer for reductions, on an accelerator.

    ``itemsize`` is the reduce dtype's.
    """
    trained = [unit.shard_numel for unit in units if unit.trainable]
    return itemsize * cluster.nodes * cluster.ranks_per_node * max(trained, default=0)


def partials(units: Sequence[Any], nodes: int, place: PartialsChoice = "device") -> int:
    """Partial gradients of one rank (``fcdp.accumulate``), in bytes; fp32.

    ``place`` is ``CommOptions.partial_gradients``; ``auto`` is counted as on a CPU.
    """
    if place == "each":
        return 0
    sizes = [4 * nodes * unit.shard_numel for unit in units if unit.trainable]
    return sum(map(aligned, sizes)) if place == "host" else sum(sizes)


def residuals(units: Sequence[Any], nodes: int) -> int:
    """Bytes that error feedback keeps on one rank's device, in fp32."""
    return sum(4 * (nodes - 1) * unit.shard_numel for unit in units if unit.trainable)


def checksums(units: Sequence[Any], nodes: int) -> int:
    """Bytes that ``verify=True`` keeps on the device."""
    return 8 * (nodes - 1) * len(units)


def guard(units: Sequence[Any], nodes: int) -> int:
    """Bytes that ``detect_writes=True`` keeps on the device: nine checksums and a flag per unit."""
    return (9 * 8 + 1) * len(units) if nodes > 1 else 0


def blocks(parameters: float, layers: int, itemsize: int, cluster: Cluster) -> list[Unit]:
    """A model of this size as if it were equal blocks and nothing else."""
    numel = int(parameters) // layers // (cluster.nodes * cluster.ranks_per_node)
    return [Unit(str(at), itemsize * numel, numel, topology=cluster) for at in range(layers)]


@dataclass(frozen=True)
class Example:
    """A model in bf16 with AdamW in fp32, or adapters of a hundredth of its size."""

    name: str
    parameters: float
    layers: int
    cluster: Cluster = Cluster(4, 8)
    adapters: float = 0.01

    def memory_row(self, name: str) -> list[str]:
        cluster, ranks = self.cluster, self.cluster.ranks_per_node
        memory = cache(parse(name), blocks(self.parameters, self.layers, 2, cluster), cluster)
        most = "≤ " if name.startswith(("threshold", "auto")) else ""
        return [
            self.name,
            f"`{name}`",
            f"{most}{memory.device / GB:.2f}" if memory.device else "0",
            f"{memory.slices / GB:.3f}" if memory.slices else "0",
            _gb(memory.host),
            _gb(memory.host * ranks),
            _gb(memory.disk * ranks),
        ]

    def traffic_row(self, tuning: str, micro_batches: int) -> list[str]:
        gathered = 2 * self.parameters
        lora = tuning == "LoRA"
        trained = self.adapters * gathered if lora else gathered
        total = gathered + trained if lora else gathered
        zero3, here = traffic(total, trained, self.cluster.nodes, micro_batches)
        sent = [f"{zero3 / GB:,.1f}", f"{here / GB:,.1f}", f"{100 * here / zero3:.2g} %"]
        return [self.name, tuning, str(micro_batches), *sent]


def traffic(
    gathered: float, trained: float, nodes: int, micro_batches: int = 1
) -> tuple[float, float]:
    """Bytes that one node sends to others per step: ZeRO-3's, and this library's.

    ``gathered`` and ``trained``: bytes of all parameters and of those that are trained, in the
    dtype that gathers and reductions share.
    """
    share = (nodes - 1) / nodes
    return micro_batches * share * (2 * gathered + trained), share * 2 * trained


def pipeline_traffic(
    parameters: float, width: float, nodes: int, tokens: float, *, per_stage: int, size: int = 2
) -> float:
    """Bytes that the busiest node of a pipeline sends per step of full fine-tuning.

    Stages are equal, and each is ``per_stage`` nodes, inside of which FCDP shards it; an element
    takes ``size`` bytes, and ``tokens`` are those of all ranks.
    """
    stages = nodes // per_stage
    _, inside = traffic(size * parameters / stages, size * parameters / stages, per_stage)
    return inside + min(2, stages - 1) * tokens / per_stage * width * size


POLICIES = [
    "none",
    "device",
    "host",
    "disk",
    "threshold(0.8)",
    "budget(device=100 MiB, host=1 GiB)",
    "auto",
]
EXAMPLES = [
    Example(name, Transformer.of(spec, SEQUENCE_LENGTH).parameters, spec.layers)
    for name, spec in PAPER_MODELS.items()
    if name != "gpt-20b"
]


def of_caches() -> str:
    """Table of the examples' caches, by policy, as Markdown."""
    words = ("Model", "Policy")
    numbers = (
        "device GB per rank",
        "slices GB per rank",
        "host GB per rank",
        "host GB per node",
        "disk GB per node",
    )
    rows = [example.memory_row(policy) for example in EXAMPLES for policy in POLICIES]
    return text.table((*words, *numbers), rows, words)


def of_traffic() -> str:
    """Bytes that the examples send per step, as Markdown."""
    words = ("Model", "Tuning")
    rows = [
        example.traffic_row(tuning, micro_batches)
        for example in EXAMPLES
        for tuning in ("full", "LoRA")
        for micro_batches in (1, 8)
    ]
    numbers = ("Micro-batches", "ZeRO-3 GB", "FCDP GB", "FCDP / ZeRO-3")
    return text.table((*words, *numbers), rows, words)


def of_pipelines() -> str:
    """Tokens per step at which a pipeline sends as much as FCDP, as Markdown."""
    nodes = (2, 4, 8)
    rows = []
    for name in ("mistral-7b", "gpt-30b", "llama-3-70b"):
        model = models.shape(name, SEQUENCE_LENGTH)
        tokens = (equal_tokens(model.parameters, model.width, each) for each in nodes)
        rows.append((name, *(f"{count / 1e6:.1f} M" for count in tokens)))
    return text.table(("Model", *(f"{each} nodes" for each in nodes)), rows)


def of_groups() -> str:
    """Bytes that a node sends by FCDP, a pipeline, and a pipeline of FCDP groups, as Markdown."""
    rows = []
    for name, nodes, per_stage, tokens in (
        ("mistral-7b", 4, 2, 2**20),
        ("llama-3-70b", 4, 2, 2**22),
        ("llama-3-70b", 16, 4, 2**22),
    ):
        model = models.shape(name, SEQUENCE_LENGTH)
        sent = (
            pipeline_traffic(model.parameters, model.width, nodes, tokens, per_stage=each) / GB
            for each in (nodes, 1, per_stage)
        )
        counts = (str(nodes), f"{tokens / 1e6:.1f} M", str(per_stage))
        rows.append((name, *counts, *(f"{each:.1f}" for each in sent)))
    sizes = ("FCDP GB", "Pipeline GB", "Pipeline of groups GB")
    numbers = ("Nodes", "Tokens", "Nodes per stage", *sizes)
    return text.table(("Model", *numbers), rows)


def of_others() -> str:
    """Table of the examples' memory beside the cache, as Markdown."""
    numbers = (
        "partial gradients, full",
        "partial gradients, LoRA",
        "second reduction buffer",
        "`verify` keeps",
        "`detect_writes` keeps",
    )
    return text.table(("Model", *numbers), map(_others_row, EXAMPLES))


def _others_row(example: Example) -> list[str]:
    cluster = example.cluster
    full = blocks(example.parameters, example.layers, 2, cluster)
    lora = blocks(example.adapters * example.parameters, example.layers, 2, cluster)
    return [
        example.name,
        f"{partials(full, cluster.nodes) / GB:.3g} GB",
        f"{partials(lora, cluster.nodes) / GB:.3g} GB",
        f"{reduction_buffer(full, cluster, 2) / GB:.2g} GB",
        f"{checksums(full, cluster.nodes)} bytes",
        f"{guard(full, cluster.nodes)} bytes",
    ]


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:.2f}" if nbytes else "0"
