"""The host tier: entries in one arena of host memory, page-locked on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fcdp import memory
from fcdp.arena import POISON, Arena, aligned
from fcdp.tiers.tier import TierUnavailable, others
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(eq=False)
class _Entry:
    #: uint8 (nodes − 1, shard bytes): the other nodes' shards in node order.
    shards: torch.Tensor
    #: Keeps memory that was taken outside of the plan.
    arena: Arena | None = None
    #: The last copy into the entry, and the last out of it on each stream. ``None`` on the CPU,
    #: where copies have ended when they return.
    landed: Any = None
    reads: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Staging:
    """Device memory that one entry is copied to ahead of its gather."""

    memory: torch.Tensor
    unit: Unit | None = None
    filled: Any = None
    free: Any = None


class HostTier:
    """Copies out of the device run on one stream, copies ahead of their gathers on another."""

    def __init__(
        self,
        planned: Sequence[Unit],
        topology: Topology,
        device: torch.device,
        *,
        look_ahead: int,
        poison: bool,
    ) -> None:
        """Allocate the arena for ``planned``."""
        self._node = topology.node
        self._others = topology.nodes - 1
        self._device = device
        self._poison = poison
        self._backend = torch.get_device_module(device)
        self._copies_out = self._backend.Stream()
        self._copies_in = self._backend.Stream()
        self.nbytes = planned_bytes(planned, topology)
        # Kept: memory stays page-locked for as long as its arena lives.
        self._arena = Arena(self.nbytes, device, poison=poison)
        self._entries = {
            unit: _Entry(self._view(self._arena.take(self._size(unit)), unit)) for unit in planned
        }
        self._staging: list[_Staging] = []
        if device.type != "cpu" and planned and self._others:
            largest = max(map(self._size, planned))
            self._staging = [
                _Staging(torch.empty(largest, dtype=torch.uint8, device=device))
                for _ in range(look_ahead)
            ]

    def store(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        entry = self._entries.get(unit) or self._take_more(unit)
        self._forget_staged(unit)
        self._copies_out.wait_stream(self._backend.current_stream())
        for read in entry.reads.values():
            if read is not None:
                self._copies_out.wait_event(read)
        entry.reads.clear()
        with self._backend.stream(self._copies_out):
            for stored, shard in others(entry.shards, shards, self._node):
                stored.copy_(shard, non_blocking=True)
                if shard.device.type != "cpu":
                    # FSDP2 frees the gathered unit before the copy has read it.
                    shard.record_stream(self._copies_out)
            entry.landed = self._copies_out.record_event()

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        entry = self._entries[unit]
        stream = self._backend.current_stream()
        staging = next((slot for slot in self._staging if slot.unit is unit), None)
        if staging is not None:
            stream.wait_event(staging.filled)
            source = self._view(staging.memory[: self._size(unit)], unit)
        else:
            if entry.landed is not None:
                stream.wait_event(entry.landed)
            source = entry.shards
        for stored, shard in others(source, shards, self._node):
            shard.copy_(stored, non_blocking=True)
        event = stream.record_event()
        if staging is not None:
            staging.unit, staging.free = None, event
        else:
            entry.reads[stream] = event

    def expect(self, unit: Unit) -> None:
        """Copy the entry to the device beside what runs now, if a staging buffer is free.

        Not one byte moves twice over the host link: the gather takes the staged copy.
        """
        entry = self._entries.get(unit)
        slot = next((slot for slot in self._staging if slot.unit is None), None)
        if entry is None or slot is None or any(other.unit is unit for other in self._staging):
            return
        for event in (entry.landed, slot.free):
            if event is not None:
                self._copies_in.wait_event(event)
        with self._backend.stream(self._copies_in):
            staged = slot.memory[: self._size(unit)].view_as(entry.shards)
            staged.copy_(entry.shards, non_blocking=True)
            slot.filled = entry.reads[self._copies_in] = self._copies_in.record_event()
        slot.unit = unit

    def intact(self, unit: Unit) -> bool:
        return True

    def drop(self, unit: Unit) -> None:
        """Memory of the arena stays for the unit; no copy of it stays staged."""
        self._forget_staged(unit)
        if self._poison and unit in self._entries:
            self._backend.synchronize()
            self._entries[unit].shards.fill_(POISON)

    def _forget_staged(self, unit: Unit) -> None:
        for slot in self._staging:
            if slot.unit is unit:
                slot.unit, slot.free = None, slot.filled

    def _take_more(self, unit: Unit) -> _Entry:
        """Memory for a unit that was to lie elsewhere and could not."""
        size = self._size(unit)
        free = memory.available_host_memory()
        if free is not None and size > free:
            raise TierUnavailable(f"the host has no {size / 2**20:.1f} MiB free")
        try:
            arena = Arena(size, self._device, poison=self._poison)
        except RuntimeError as error:
            raise TierUnavailable(str(error)) from error
        self.nbytes += size
        entry = self._entries[unit] = _Entry(self._view(arena.take(size), unit), arena)
        return entry

    def _size(self, unit: Unit) -> int:
        return self._others * unit.shard_bytes

    def _view(self, memory: torch.Tensor, unit: Unit) -> torch.Tensor:
        return memory.view(self._others, unit.shard_bytes)


def planned_bytes(planned: Sequence[Unit], topology: Topology) -> int:
    """What the arena of one rank takes."""
    return sum(aligned((topology.nodes - 1) * unit.shard_bytes) for unit in planned)
