"""Interface of all tiers."""

from __future__ import annotations

from typing import Protocol

import torch

from fcdp.cache.entry import Slice
from fcdp.unit import Unit


class TierUnavailable(Exception):
    """The tier cannot take this entry now; its message says why."""


class Tier(Protocol):
    """Holds, for some units, the rows of slices that this rank received from the other nodes.

    This rank's own row is left out, since it is at hand anyway.
    """

    def store(self, unit: Unit, given: Slice) -> None:
        """Take a copy of the other nodes' rows, once they have been written.

        Raises :class:`TierUnavailable` before anything was copied.
        """
        ...

    def load(self, unit: Unit, wanted: Slice) -> None:
        """Fill the other nodes' rows, on the stream that is the slice's home."""
        ...

    def expect(self, unit: Unit) -> None:
        """A load of this unit is near: begin to fetch what takes long."""
        ...

    def intact(self, unit: Unit) -> bool:
        """Whether the entry can be loaded; may wait for it. Always true of memory."""
        ...

    def drop(self, unit: Unit) -> None:
        """Forget the entry, if there is one, and what it takes."""
        ...


def runs(stored: torch.Tensor, given: Slice, node: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair stored rows with those of a slice, in at most two runs and in the slice's dtype.

    ``stored`` is uint8 (nodes − 1, shard bytes), the other nodes in order.
    """
    if stored.dtype != given.memory.dtype:
        stored = stored.view(given.memory.dtype)
    parts = given.others()
    if len(parts) == 1:
        return [(stored, parts[0])]
    return [(stored[:node], parts[0]), (stored[node:], parts[1])]
