"""The base of all tiers: their interface, and copies between slices and what they keep."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from fcdp.cache.entry import Access, Slice
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit


class TierUnavailable(Exception):
    """The tier cannot take this entry now; its message says why."""


class Tier(ABC):
    """Holds, for some units, the rows of slices that this rank received from the other nodes.

    This rank's own row is left out, since it is at hand anyway. Copies out of slices run on one
    stream, copies into them on another.
    """

    def __init__(self, topology: Topology, streams: Streams) -> None:
        self._node = topology.node
        self._others = topology.nodes - 1
        self._streams = streams

    @abstractmethod
    def store(self, unit: Unit, given: Slice) -> None:
        """Take a copy of the other nodes' rows, once they have been written.

        Raises :class:`TierUnavailable` before anything was copied.
        """

    @abstractmethod
    def load(self, unit: Unit, wanted: Slice) -> None:
        """Fill the other nodes' rows, on the stream that is the slice's home."""

    def expect(self, unit: Unit) -> None:  # noqa: B027 - memory needs nothing here
        """A load of this unit is near: begin to fetch what takes long."""

    def intact(self, unit: Unit) -> bool:
        """Whether the entry can be loaded; may wait for it. Always true of memory."""
        return True

    @abstractmethod
    def drop(self, unit: Unit) -> None:
        """Forget the entry, if there is one, and what it takes."""

    def _size(self, unit: Unit) -> int:
        return self._others * unit.shard_bytes

    def _rows(self, memory: torch.Tensor, unit: Unit) -> torch.Tensor:
        """An entry's bytes as uint8 (nodes − 1, shard bytes): the other nodes' in node order."""
        return memory[: self._size(unit)].view(self._others, unit.shard_bytes)

    def _copy_in(self, given: Slice, rows: torch.Tensor, access: Access) -> None:
        """Queue a copy of a slice to ``rows``, whose accesses ``access`` orders."""
        stream = self._streams.copies_out
        with self._streams.on(stream), given.access.reading(stream), access.writing(stream):
            for stored, part in self._runs(rows, given):
                stored.copy_(part, non_blocking=True)

    def _copy_out(self, rows: torch.Tensor, access: Access, wanted: Slice) -> None:
        """Queue a copy of ``rows`` to a slice."""
        stream = wanted.home
        with self._streams.on(stream), access.reading(stream), wanted.access.writing(stream):
            for stored, part in self._runs(rows, wanted):
                part.copy_(stored, non_blocking=True)

    def _runs(self, rows: torch.Tensor, of: Slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair stored rows with those of a slice, in at most two runs and in the slice's dtype."""
        if rows.dtype != of.memory.dtype:
            rows = rows.view(of.memory.dtype)
        parts = of.others()
        if len(parts) == 1:
            return [(rows, parts[0])]
        return [(rows[: self._node], parts[0]), (rows[self._node :], parts[1])]
