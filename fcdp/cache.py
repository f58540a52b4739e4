"""Where gathered parameters stay: cache policies and the host arena behind them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fcdp.topology import Topology
from fcdp.unit import Unit

logger = logging.getLogger("fcdp")

#: Entries start on this boundary, so that every dtype can view them and copies are aligned.
_ALIGNMENT = 512


class Cache(Protocol):
    """Holds, for each unit, the shards that this rank received from the other nodes."""

    #: Memory taken on this rank's host, in bytes.
    host_bytes: int

    def generation(self, unit: Unit) -> int:
        """Generation of the unit's entry; 0 if there is none."""
        ...

    def store(self, unit: Unit, shards: Sequence[torch.Tensor], generation: int) -> int:
        """Copy the other nodes' shards (given one a node, own included); return bytes copied."""
        ...

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> int:
        """Fill the shards of the other nodes (own untouched); return the bytes copied."""
        ...


class CachePolicy(Protocol):
    """Chooses where entries live. A policy is one class; every rank calls ``build`` once."""

    def build(self, units: Sequence[Unit], topology: Topology, device: torch.device) -> Cache: ...


@dataclass(frozen=True)
class NoCache:
    """Gather across nodes every time: ZeRO-3, with this library's hierarchical collectives."""

    def build(self, units: Sequence[Unit], topology: Topology, device: torch.device) -> Cache:
        return _Nothing()


@dataclass(frozen=True)
class HostCache:
    """Keep every unit in host memory (the paper's FCDP-Cache above its threshold).

    A rank stores what it received from the other nodes: (n−1)/n of its 1/L slice, because its own
    shard is at hand anyway. A node holds (n−1)/n of the gathered model in all.
    """

    def build(self, units: Sequence[Unit], topology: Topology, device: torch.device) -> Cache:
        """Allocate the arena. Raises ``ValueError`` if the node has not that much memory free."""
        return _HostTier(units, topology, device)


class _Nothing:
    host_bytes = 0

    def generation(self, unit: Unit) -> int:
        return 0

    def store(self, unit: Unit, shards: Sequence[torch.Tensor], generation: int) -> int:
        return 0

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> int:
        raise AssertionError(f"{unit.name}: nothing is ever stored, so nothing can be loaded")


@dataclass(eq=False)
class _Entry:
    #: uint8 (nodes − 1, shard bytes): the other nodes' shards in node order.
    shards: torch.Tensor
    generation: int = 0
    #: The last copy into the entry, and the last out of it. ``None`` on the CPU, where copies
    #: have ended when they return.
    landed: Any = None
    read: Any = None


class _HostTier:
    """Entries in one arena of host memory, page-locked on CUDA; copies on a stream of their own."""

    def __init__(self, units: Sequence[Unit], topology: Topology, device: torch.device) -> None:
        self._node = topology.node
        self._device = device
        self._backend = torch.get_device_module(device)
        self._copies_out = self._backend.Stream()
        others = topology.nodes - 1
        sizes = [_round_up(others * unit.shard_bytes) for unit in units]
        self.host_bytes = sum(sizes)
        _check_host_memory(self.host_bytes, topology)
        self._arena = _Arena(self.host_bytes, device)
        self._entries: dict[Unit, _Entry] = {}
        offset = 0
        for unit, size in zip(units, sizes, strict=True):
            taken = self._arena.memory[offset : offset + others * unit.shard_bytes]
            self._entries[unit] = _Entry(taken.view(others, unit.shard_bytes))
            offset += size
        logger.info(
            "host cache: %.1f MiB a rank, %.1f MiB a node",
            self.host_bytes / 2**20,
            self.host_bytes * topology.ranks_per_node / 2**20,
        )

    def generation(self, unit: Unit) -> int:
        return self._entries[unit].generation

    def store(self, unit: Unit, shards: Sequence[torch.Tensor], generation: int) -> int:
        entry = self._entries[unit]
        self._copies_out.wait_stream(self._backend.current_stream())
        if entry.read is not None:
            self._copies_out.wait_event(entry.read)
        with self._backend.stream(self._copies_out):
            for stored, shard in self._others(entry, shards):
                stored.copy_(shard, non_blocking=True)
                if shard.device.type != "cpu":
                    # FSDP2 frees the gathered unit before the copy has read it.
                    shard.record_stream(self._copies_out)
            entry.landed = self._copies_out.record_event()
        entry.generation = generation
        return entry.shards.numel()

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> int:
        entry = self._entries[unit]
        stream = self._backend.current_stream()
        if entry.landed is not None:
            stream.wait_event(entry.landed)
        for stored, shard in self._others(entry, shards):
            shard.copy_(stored, non_blocking=True)
        entry.read = stream.record_event()
        return entry.shards.numel()

    def _others(
        self, entry: _Entry, shards: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of (stored, given) shards of the other nodes, in the dtype of the given ones."""
        others = (shard for node, shard in enumerate(shards) if node != self._node)
        for stored, shard in zip(entry.shards, others, strict=True):
            yield stored.view(shard.dtype), shard


class _Arena:
    """One block of host memory, registered with CUDA once.

    ``pin_memory()`` would round the block up to a power of two and never give it back.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8)
        self._registered = device.type == "cuda" and size > 0
        if self._registered:
            error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0)
            if int(error) != 0:
                self._registered = False
                raise RuntimeError(
                    f"CUDA could not page-lock {size} bytes of host memory ({error}); "
                    "raise the limit (ulimit -l, docker --ulimit memlock=-1)"
                )

    def __del__(self) -> None:
        if getattr(self, "_registered", False):
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


def _round_up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_host_memory(rank_bytes: int, topology: Topology) -> None:
    """Refuse before the first step what would end in the kernel's out-of-memory killer."""
    available = _available_host_memory()
    wanted = rank_bytes * topology.ranks_per_node
    if available is not None and wanted > available:
        raise ValueError(
            f"policy = HostCache(): {wanted / 2**30:.1f} GiB a node "
            f"({topology.ranks_per_node} ranks × {rank_bytes / 2**30:.1f} GiB), "
            f"but only {available / 2**30:.1f} GiB of host memory are free; use more nodes' "
            "memory, a smaller gather dtype, or NoCache()"
        )


def _available_host_memory() -> int | None:
    """``MemAvailable`` of Linux in bytes; ``None`` on other systems."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return None
    return int(fields["MemAvailable"].split()[0]) * 1024
