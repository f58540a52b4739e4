"""The strategies: one line each. Imports no engine, for programs that must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from baselines import pins
from baselines.pins import Pin

Engine = Literal["fcdp", "fsdp2", "ddp", "deepspeed"]


@dataclass(frozen=True)
class Entry:
    """A strategy: the module of its name in this folder, with ``-`` for ``_``."""

    name: str
    engine: Engine
    what: str
    #: What its engine does that needs CUDA and NCCL; ``None`` if a CPU over gloo will do.
    needs_cuda: str | None = None
    #: Builders of operators that its engine compiles at their first use, beside those of all.
    operators: tuple[str, ...] = ()
    #: A header that an operator of its engine is compiled with, and the package that has it.
    needs_header: tuple[Path, str] | None = None

    @property
    def module(self) -> str:
        return "baselines." + self.name.replace("-", "_")

    def engine_version(self, deepspeed: Pin = "current") -> str | None:
        """Of the package that the engine is in; ``None`` if it is not installed."""
        return pins.version(deepspeed) if self.engine == "deepspeed" else metadata.version("torch")

    def why_not(self, *, cuda: bool, deepspeed: Pin = "current") -> str | None:
        """Why it cannot run on this machine, with this pin of DeepSpeed; ``None`` if it can."""
        if self.engine != "deepspeed":
            if deepspeed != "current":
                return f"{self.name} does not use DeepSpeed, so it has one pin only"
            return None
        version = pins.version(deepspeed)
        if version is None:
            return f"DeepSpeed ({deepspeed}) is not installed: {pins.COMMANDS[deepspeed]}"
        if self.needs_cuda and not cuda:
            return f"DeepSpeed {version} {self.needs_cuda}"
        if self.needs_header and not self.needs_header[0].exists():
            header, package = self.needs_header
            return f"{header} is missing: sudo apt-get install {package}"
        return None


def has_cuda() -> bool:
    """Whether ranks here would compute on CUDA: an NVIDIA driver, and a torch that can use it."""
    return Path("/proc/driver/nvidia/version").exists() and "+cpu" not in metadata.version("torch")


_FUSED = "quantises with its CUDA operator quantizer, which has no CPU build"
_COALESCED = "gathers MiCS's shards by NCCL's coalesced all-gather, which gloo has not"

ENTRIES: tuple[Entry, ...] = (
    Entry("deepspeed-zero3", "deepspeed", "ZeRO stage 3"),
    Entry("deepspeed-hpz", "deepspeed", "ZeRO++ hpZ: a second shard inside the node"),
    Entry("deepspeed-qwz", "deepspeed", "ZeRO++ qwZ: int8 gathers", _FUSED),
    Entry("deepspeed-qgz", "deepspeed", "ZeRO++ qgZ: int4 reductions", _FUSED),
    Entry("deepspeed-zeropp", "deepspeed", "ZeRO++: hpZ, qwZ and qgZ", _FUSED),
    Entry("deepspeed-mics", "deepspeed", "MiCS: sharded inside the node", _COALESCED),
    Entry("deepspeed-mics-hierarchical", "deepspeed", "MiCS, gathers in two hops", _COALESCED),
    Entry(
        "deepspeed-offload",
        "deepspeed",
        "ZeRO-Offload: optimizer on the CPU",
        operators=("CPUAdamBuilder",),
    ),
    Entry(
        "deepspeed-offload-param",
        "deepspeed",
        "ZeRO-Offload: parameters on the CPU too",
        operators=("CPUAdamBuilder",),
    ),
    Entry(
        "deepspeed-infinity",
        "deepspeed",
        "ZeRO-Infinity: parameters and optimizer on NVMe",
        operators=("AsyncIOBuilder", "CPUAdamBuilder"),
        needs_header=(Path("/usr/include/libaio.h"), "libaio-dev"),
    ),
    Entry("deepspeed-hpz-offload", "deepspeed", "hpZ, with parameters on the CPU"),
    Entry("fsdp2", "fsdp2", "ZeRO-3 as PyTorch ships it"),
    Entry("fsdp2-hsdp", "fsdp2", "hybrid sharding: inside the node, replicated across"),
    Entry("fsdp2-reshard", "fsdp2", "resharded over the node after forward, as hpZ does"),
    Entry("fsdp2-offload", "fsdp2", "parameters and optimizer on the CPU"),
    Entry("ddp", "ddp", "replicated on every rank"),
    Entry("zero3", "fcdp", "ZeRO-3 over this engine: nothing is cached"),
    Entry("hpz", "fcdp", "ZeRO++ hpZ over this engine: cached on the device"),
    Entry("mics", "fcdp", "MiCS over this engine: sharded inside the node"),
    Entry("offload", "fcdp", "ZeRO-Offload over this engine: parts and optimizer on the CPU"),
    Entry("replicated", "fcdp", "data parallel over this engine: one all-reduce a step"),
    Entry("qwz", "fcdp", "ZeRO++ qwZ over this engine: int8 gathers"),
    Entry("qgz", "fcdp", "ZeRO++ qgZ over this engine: int4 reductions"),
    Entry("zeropp", "fcdp", "ZeRO++ over this engine: hpZ, qwZ and qgZ"),
    Entry("fcdp", "fcdp", "cached in host memory, or as the cell's policy says"),
)

STRATEGY_NAMES: tuple[str, ...] = tuple(entry.name for entry in ENTRIES)


def find(name: str) -> Entry:
    """Raises ``ValueError`` for a strategy that does not exist."""
    for entry in ENTRIES:
        if entry.name == name:
            return entry
    raise ValueError(f"strategy = {name!r}: allowed are {', '.join(STRATEGY_NAMES)}")
