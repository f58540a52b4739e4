"""This rank's own shard as the other nodes hold it, the base of its differences."""

import time

import torch

from fcdp.cache.cache import Entry
from fcdp.delta import message
from fcdp.delta.difference import Coding
from fcdp.delta.economy import Economy, Watch

#: Messages that are no packed difference before one is again, to see what that takes.
_MEASURED_AFTER = 16


class Base:
    """The last version of one unit's own shard that was offered to every node's cache.

    Takes the shard's size in the memory that the shard is in, from the first gather on. On an
    accelerator the stream of gathers across nodes alone reads and writes it.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._memory: torch.Tensor | None = None
        self._version = 0
        #: Whether any rank sends a difference in this pass; else nothing is kept.
        self.sending = True

    @property
    def usable(self) -> bool:
        """Whether this rank can encode a difference, and apply those of the others."""
        entry = self.entry
        held = entry.tier is not None and entry.held == entry.offered
        return held and entry.offered > 0 and self._version == entry.offered

    @property
    def memory(self) -> torch.Tensor:
        """The shard (s) as it was sent."""
        assert self._memory is not None, self.entry.unit.name
        return self._memory

    def would_send(self) -> bool:
        """Whether this rank would send a difference in the pass that begins."""
        return True

    def forget(self) -> None:
        """Note that the other nodes' copies are about to change, on some of them perhaps."""
        self._version = 0

    def keep(self, own: torch.Tensor) -> None:
        """Note that the other nodes keep ``own`` (s), if this one keeps theirs."""
        if self.entry.tier is None:
            return
        if self._memory is None or (self._memory.shape, self._memory.dtype) != (
            own.shape,
            own.dtype,
        ):
            with torch.inference_mode(mode=False):  # it is written in training too
                self._memory = torch.empty_like(own)
        self._memory.copy_(own)
        self._version = self.entry.offered


class Sent(Base):
    """The base of differences on the CPU, with this rank's measurements of coding them."""

    def __init__(self, entry: Entry, economy: Economy) -> None:
        super().__init__(entry)
        self._economy = economy
        self._others = entry.unit.topology.nodes - 1
        #: Bytes of the last difference per byte of the shard, packed and with entropy codes; and
        #: messages since one was packed.
        self._ratio = self._finer = 0.0
        self._since = 0

    def write(self, own: torch.Tensor) -> torch.Tensor:
        """Return the message (uint8) that turns the other nodes' copies into ``own`` (s)."""
        assert self.usable, self.entry.unit.name
        self.forget()  # whoever interrupts the exchange leaves nodes with different versions
        economy = self._economy
        if not (own.nbytes and self.would_send()):
            self._since += 1
            return message.whole(own)
        finer = economy.finer_pays(self._expected, self._finer, self._others)
        begun = time.perf_counter()
        coding: Coding = "entropy" if finer else "packed"
        written = message.write(own, self.memory, self.entry.offered, coding=coding)
        took = (time.perf_counter() - begun) / own.nbytes
        if finer:
            self._since += 1
            self._finer = written.nbytes / own.nbytes
            economy.finer.add(took)
        else:
            self._since = 0
            self._ratio = written.nbytes / own.nbytes
            economy.encoding.add(took)
        return written

    @property
    def _expected(self) -> float:
        """The part of a shard's bytes that a difference takes; measured anew at times."""
        return 0.0 if self._since >= _MEASURED_AFTER else self._ratio

    def would_send(self) -> bool:
        return self._economy.pays(self._expected, self._others)

    def read(self, arrived: torch.Tensor, row: torch.Tensor) -> None:
        """Apply the message of another node to its ``row`` (s), or fill that if it is whole.

        Raises ``RuntimeError`` for one that does not fit it.
        """
        entry = self.entry
        apply(arrived, row, entry.offered, economy=self._economy, name=entry.unit.name)

    def saw(self, watch: Watch, own: torch.Tensor, *, whole: bool, written: bool = True) -> None:
        """Note the end of an exchange of shards like ``own``, ``whole`` from every node or not.

        Where no rank has ``written`` a message, all were whole.
        """
        self._since += not written
        if whole:
            self._economy.saw_whole(watch.waited, self._others * own.nbytes)
        else:
            self._economy.saw_coded(watch.took, own.nbytes)


def apply(
    arrived: torch.Tensor, row: torch.Tensor, version: int, *, economy: Economy, name: str
) -> None:
    """Apply a message to the ``row`` (s), which is ``version``; ``economy`` learns the time.

    Raises ``RuntimeError``, which begins with ``name``, for a message that does not fit it.
    """
    begun = time.perf_counter()
    try:
        difference = message.read(arrived, row, version)
    except ValueError as error:
        raise RuntimeError(
            f"{name}: {error}; nothing was computed with it: go on from the last checkpoint"
        ) from error
    if difference:  # so that there are elements: what has none is sent whole
        economy.applied.add((time.perf_counter() - begun) / row.nbytes)
