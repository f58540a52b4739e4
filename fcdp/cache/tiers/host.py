"""The host tier: entries in one arena of host memory, page-locked on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fcdp.arena import POISON, Arena, aligned
from fcdp.cache import memory
from fcdp.cache.entry import Access, Slice
from fcdp.cache.tiers.tier import Tier, TierUnavailable
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(eq=False)
class _Area:
    rows: torch.Tensor
    #: Keeps memory that was taken outside of the plan.
    arena: Arena | None = None
    access: Access = field(default_factory=Access)


class HostTier(Tier):
    """Memory for each planned unit, and for others as they come, while the host has some free."""

    def __init__(
        self,
        planned: Sequence[Unit],
        topology: Topology,
        device: torch.device,
        streams: Streams,
        *,
        poison: bool,
    ) -> None:
        super().__init__(topology, streams)
        self._device = device
        self._poison = poison
        self.nbytes = planned_bytes(planned, topology)
        # Kept: memory stays page-locked for as long as its arena lives.
        self._arena = Arena(self.nbytes, device, poison=poison)
        self._areas = {
            unit: _Area(self._rows(self._arena.take(self._size(unit)), unit)) for unit in planned
        }

    def store(self, unit: Unit, given: Slice) -> None:
        area = self._areas.get(unit) or self._take_more(unit)
        self._copy_in(given, area.rows, area.access)

    def load(self, unit: Unit, wanted: Slice) -> None:
        area = self._areas[unit]
        self._copy_out(area.rows, area.access, wanted)

    def drop(self, unit: Unit) -> None:
        """Memory of the arena stays for the unit."""
        if self._poison and unit in self._areas:
            for event in self._areas[unit].access.events():
                event.synchronize()
            self._areas[unit].rows.fill_(POISON)

    def _take_more(self, unit: Unit) -> _Area:
        """Take memory for a unit that was to lie elsewhere and could not."""
        size = self._size(unit)
        free = memory.available_host_memory()
        if free is not None and size > free:
            raise TierUnavailable(f"the host has no {size / 2**20:.1f} MiB free")
        try:
            arena = Arena(size, self._device, poison=self._poison)
        except (RuntimeError, OSError) as error:
            raise TierUnavailable(str(error)) from error
        self.nbytes += size
        area = self._areas[unit] = _Area(self._rows(arena.take(size), unit), arena)
        return area


def planned_bytes(planned: Sequence[Unit], topology: Topology) -> int:
    """Bytes that the arena of one rank takes."""
    return sum(aligned((topology.nodes - 1) * unit.shard_bytes) for unit in planned)
