"""Interfaces by which codecs change gathers and reductions, and have the ranks agree.

Gathers, reductions and the pass controller know these interfaces alone. Codecs that round implement
them in :mod:`fcdp.rounding`, lossless ones in :mod:`fcdp.delta`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fcdp.cache.cache import Cache, Entry
from fcdp.counts import Ledger, Phase
from fcdp.exchange import Pending
from fcdp.streams import Slice, Streams
from fcdp.topology import Topology
from fcdp.unit import Unit


class GatherHook(Protocol):
    """Changes how one unit's shards cross nodes. A gather calls its methods in this order.

    Of a hit it calls ``hit`` alone. Shards are (s), in the gather dtype, in the memory that FSDP2
    gathers from; a hook may write to them.

    One gather of a unit is under way at a time, so that a hook may keep state between its calls. An
    error may end a gather after any of them; ``prepare`` begins the next. What is kept longer than
    to ``decode`` keeps FSDP2's output, the whole unit, in memory.
    """

    def hit(self, own: torch.Tensor) -> None:
        """Give this rank's shard the values that the other nodes compute with."""

    def prepare(self, received: Slice, phase: Phase, *, difference: bool) -> None:
        """Get ready to cross nodes; ``difference`` is the decision of all ranks together."""

    def encode(self, own: torch.Tensor, received: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what this rank sends, (k), and where the nodes' messages arrive, (n, ≥ k).

        On an accelerator it is queued on the stream of the exchange.
        """

    def sent(self, works: Sequence[Pending]) -> Sequence[Pending]:
        """Return the exchanges to wait for in place of ``works``. Called on the CPU alone."""

    def decode(self, messages: torch.Tensor, received: Slice) -> None:
        """Fill the other nodes' rows of ``received`` from ``messages``, which have arrived."""

    def stored(self, own: torch.Tensor) -> None:
        """Note that the cache was offered what was received; not called where nothing is kept."""


class Extension(Protocol):
    """A codec's part in the agreement of all ranks that precedes a pass's first gather."""

    def votes(self) -> list[bool]:
        """Return this rank's votes: of equal number on every rank and in each pass."""

    def agreed(self, votes: Sequence[bool]) -> None:
        """Act on the votes, each set if any rank has set it. Every rank is called."""


class GatherExtension(Extension, Protocol):
    """An extension that decides, with the agreement, how trained units cross nodes."""

    def hook(self, unit: Unit) -> GatherHook:
        """Return the hook of one unit's gathers."""

    def lacks_base(self, unit: Unit) -> bool:
        """Whether this rank cannot send a unit's difference, or apply those of the others."""

    def wants(self, unit: Unit) -> bool:
        """Whether ranks send differences of the unit in this pass; alike on every rank."""


class ReduceHook(Protocol):
    """Reduces one unit's partial gradients across nodes in place of a plain reduce-scatter."""

    @property
    def wide(self) -> bool:
        """Whether it takes sums of micro-batches in the dtype that they were added up in."""

    def start(self, output: torch.Tensor, partial: torch.Tensor) -> list[Pending]:
        """Start to reduce ``partial`` (n·s) over the nodes to ``output`` (s).

        Complete once the returned exchanges have been waited for, in stream order on accelerators.
        """


class ReduceExtension(Extension, Protocol):
    """An extension that reduces gradients across nodes in its own way."""

    def hook(self, unit: Unit) -> ReduceHook:
        """Return the hook of one unit's reductions."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that an extension may use."""

    entries: Mapping[Unit, Entry]
    cache: Cache
    streams: Streams
    ledger: Ledger


class LosslessCodec(ABC):
    """A user's settings of a codec that takes part in what the ranks agree on."""

    @abstractmethod
    def load(self, topology: Topology) -> None:
        """Import what coding needs, on all ranks or on none. Collective.

        Raises ``ValueError`` on all ranks where one lacks it.
        """


class LosslessGather(LosslessCodec):
    """A lossless codec of gathers, as ``gather_codec`` takes it."""

    @abstractmethod
    def check(self, units: Sequence[Unit]) -> None:
        """Raise ``ValueError`` for a unit whose shards it cannot encode."""

    @abstractmethod
    def extend(self, parts: EngineParts) -> GatherExtension:
        """Make the hooks of one engine's gathers."""


class LosslessReduce(LosslessCodec):
    """A lossless codec of reductions, as ``reduce_codec`` takes it."""

    @abstractmethod
    def check(self, topology: Topology) -> None:
        """Raise ``ValueError`` where it cannot run."""

    @abstractmethod
    def extend(self, parts: EngineParts) -> ReduceExtension:
        """Make the hooks of one engine's reductions."""
