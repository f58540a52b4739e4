"""What every tier can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch

from fcdp.unit import Unit

TierName = Literal["device", "host", "disk"]


class TierUnavailable(Exception):
    """The tier cannot take this entry now; its message says why."""


class Tier(Protocol):
    """Holds, for some units, the shards that this rank received from the other nodes.

    ``shards`` are always given one a node in node order, this rank's own among them: a tier skips
    it, since it is at hand anyway. They are 1-D, of one dtype, and views of the gather's output.
    """

    def store(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        """Take a copy, in the order of the current stream.

        Raises :class:`TierUnavailable` before anything was copied.
        """
        ...

    def load(self, unit: Unit, shards: Sequence[torch.Tensor]) -> None:
        """Fill the other nodes' shards, in the order of the current stream."""
        ...

    def expect(self, unit: Unit) -> None:
        """A load of this unit is near: what can be fetched ahead of it may be."""
        ...

    def intact(self, unit: Unit) -> bool:
        """Whether the entry can be loaded; may wait for it. Always true of memory."""
        ...

    def drop(self, unit: Unit) -> None:
        """Forget the entry, if there is one, and what it takes."""
        ...


def others(
    stored: torch.Tensor, shards: Sequence[torch.Tensor], node: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of (stored, given) shards of the other nodes, in the dtype of the given ones.

    ``stored`` is uint8 (nodes − 1, shard bytes), the other nodes in order.
    """
    given = (shard for index, shard in enumerate(shards) if index != node)
    for row, shard in zip(stored, given, strict=True):
        yield row.view(shard.dtype), shard
