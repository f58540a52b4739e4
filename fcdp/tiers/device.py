"""The device tier: entries stay on the accelerator (ZeRO++'s hpZ; MiCS keeps as much)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fcdp.tiers.tier import TierUnavailable, others
from fcdp.topology import Topology
from fcdp.unit import Unit


class DeviceTier:
    """One tensor a unit, taken when it is first stored and overwritten in place from then on."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._node = topology.node
        self._others = topology.nodes - 1
        self._device = device
        self._backend = torch.get_device_module(device)
        self._entries: dict[Unit, torch.Tensor] = {}
        #: After the last copy into or out of an entry: gathers may change streams.
        self._touched: dict[Unit, torch.Event] = {}

    @property
    def nbytes(self) -> int:
        """Device memory that entries take."""
        return sum(entry.numel() for entry in self._entries.values())

    def store(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        if unit not in self._entries:
            self._entries[unit] = self._allocate(unit)
        self._copy(unit, shards, inward=True)

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        self._copy(unit, shards, inward=False)

    def expect(self, unit: Unit) -> None:
        """Nothing is nearer than this."""

    def intact(self, unit: Unit) -> bool:
        return True

    def drop(self, unit: Unit) -> None:
        self._entries.pop(unit, None)
        self._touched.pop(unit, None)

    def _allocate(self, unit: Unit) -> torch.Tensor:
        try:
            return torch.empty(
                (self._others, unit.shard_bytes), dtype=torch.uint8, device=self._device
            )
        except torch.OutOfMemoryError as error:
            raise TierUnavailable(
                f"the device has no {self._others * unit.shard_bytes / 2**20:.1f} MiB free"
            ) from error

    def _copy(self, unit: Unit, shards: Sequence[torch.Tensor], *, inward: bool) -> None:
        stream = self._backend.current_stream()
        if unit in self._touched:
            stream.wait_event(self._touched[unit])
        for stored, shard in others(self._entries[unit], shards, self._node):
            if inward:
                stored.copy_(shard)
            else:
                shard.copy_(stored)
        if self._device.type != "cpu":
            self._touched[unit] = stream.record_event()
            self._entries[unit].record_stream(stream)
