"""The device tier: entries stay on the accelerator (ZeRO++'s hpZ; MiCS keeps as much)."""

from __future__ import annotations

import torch

from fcdp.cache.entry import Access, Slice
from fcdp.cache.tiers.tier import Tier, TierUnavailable
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit


class DeviceTier(Tier):
    """One tensor per unit, taken when it is first stored and overwritten in place from then on.

    It is allocated on the stream of copies out of slices, on which it is always written.
    """

    def __init__(self, topology: Topology, device: torch.device, streams: Streams) -> None:
        super().__init__(topology, streams)
        self._device = device
        self._entries: dict[Unit, torch.Tensor] = {}
        self._access: dict[Unit, Access] = {}
        #: Units that the device had no memory for: asking a full device again at each store would
        #: have the allocator give its reserve back and wait for the device each time.
        self._refused: set[Unit] = set()

    @property
    def nbytes(self) -> int:
        """Device memory that entries take."""
        return sum(entry.numel() for entry in self._entries.values())

    def store(self, unit: Unit, given: Slice) -> None:
        if unit not in self._entries:
            with self._streams.on(self._streams.copies_out):
                self._entries[unit] = self._allocate(unit)
            self._access[unit] = Access()
        self._copy_in(given, self._entries[unit], self._access[unit])

    def load(self, unit: Unit, wanted: Slice) -> None:
        self._copy_out(self._entries[unit], self._access[unit], wanted)

    def drop(self, unit: Unit) -> None:
        if unit in self._entries:
            # Its memory goes back to the stream it came from: not before others have read it.
            self._access.pop(unit).freed_for(self._streams.copies_out)
            del self._entries[unit]

    def _allocate(self, unit: Unit) -> torch.Tensor:
        if unit in self._refused:
            raise TierUnavailable("the device had no memory")
        try:
            memory = torch.empty(self._size(unit), dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            self._refused.add(unit)
            raise TierUnavailable(
                f"the device has no {self._size(unit) / 2**20:.1f} MiB free"
            ) from error
        return self._rows(memory, unit)
