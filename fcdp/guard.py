"""The guard: detects writes to parameters that autograd's version counters do not show."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from fcdp.checksum import quick_checksum, sum_of_words
from fcdp.streams import Streams
from fcdp.unit import Unit

#: Hits of one unit in a pass, after which it is compared earlier than at the next.
HITS = 8
#: In place of a sum that is not taken: no sum on the CPU is negative.
_UNKNOWN = -1


@dataclass(eq=False)
class _Row:
    """One unit's sums and flag, views of all units' on the device."""

    #: Sums of the shard as gathered across nodes, then at the hits since: (1 + HITS, int64).
    sums: torch.Tensor
    hits: list[torch.Tensor]
    differs: torch.Tensor
    #: Sum of what ``Unit.shard`` returned then: the same, unless an extension makes what is sent.
    held: torch.Tensor
    #: How many hits have not been compared.
    used: int = 0


class Guard:
    """Compares this rank's own shard at each hit with what it was when the entry was gathered.

    The own shard is read by every gather, and it is what a write changes first: merged adapters,
    averaged weights, whatever goes through ``param.data``. A mismatch means that the other ranks'
    shards in the cache are older than the own one beside them.

    Nothing waits for the device. Checksums and the flags of units that differ stay on the device;
    the flags are copied to the host on a stream of their own, and looked at when they have landed,
    at the latest one pass after the next. By then results were wrong already: it is an error, on
    all ranks. Writes before a pass that runs on the CPU, or without gradients, are seen in time
    (:mod:`fcdp.staleness`). Unless it ``detects``, it only remembers what units held, for
    ``check``: frozen ones when they cross nodes, trained ones, which cross in each step, when
    something is about to be in doubt.
    """

    def __init__(self, units: Sequence[Unit], streams: Streams, *, detects: bool = True) -> None:
        device = streams.device
        self.detects = detects
        #: Whether trained units are remembered when they cross nodes, too.
        self.remembers_all = detects
        self._streams = streams
        self._sum = quick_checksum if streams.on_host else sum_of_words
        #: Sums of each own shard, as last gathered across nodes and at the hits since.
        self._sums = torch.zeros(len(units), 1 + HITS, dtype=torch.int64, device=device)
        self._differ = torch.zeros(len(units), dtype=torch.bool, device=device)
        of_packed = torch.zeros(len(units), dtype=torch.int64, device=device)
        self._of = {
            unit: _Row(row, [*row[1:].unbind()], differs, held=held if unit.packed else row[0])
            for unit, row, differs, held in zip(
                units, self._sums.unbind(), self._differ.unbind(), of_packed.unbind(), strict=True
            )
        }
        # Page-locked where there is an accelerator, or the copy would block the host.
        self._landing = torch.zeros(
            len(units), dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda"
        )
        with streams.on(streams.copies_out):
            #: Flags as they were asked for. The memory goes back to the stream that copies them: an
            #: engine that is dropped meanwhile leaves it to nobody before they have landed.
            self._asked = torch.empty_like(self._differ)
        self._landed: Any = None
        #: Whether a pass has found the copy under way already.
        self._late = False

    def remember(self, unit: Unit, shard: torch.Tensor) -> None:
        """Checksum the ``shard`` (s) as gathered across nodes, in the current stream's order."""
        row = self._of[unit]
        self._look_at(row)
        if self.remembers_all or not unit.trainable:
            row.sums.copy_(self._sum(shard))
        else:
            row.sums.fill_(_UNKNOWN)
        if unit.packed:
            row.held.copy_(self._sum(unit.shard(row.held.device)))

    def note(self, unit: Unit) -> None:
        """Remember a unit that ``remember`` may not have; it is as gathered across nodes."""
        if unit.trainable and not self.detects and not unit.packed:
            self._streams.current().wait_stream(self._streams.inter_node)
            self._of[unit].sums.copy_(self._sum(unit.shard(self._sums.device)))

    def compare(self, unit: Unit, shard: torch.Tensor) -> None:
        """Note what it holds now, in the order of the current stream; it is compared once per pass.

        A comparison at each hit would be two operations more for each.
        """
        if not self.detects:
            return
        row = self._of[unit]
        if row.used == HITS:
            self._look_at(row)
        place, row.used = row.hits[row.used], row.used + 1
        self._sum(shard, place)

    def _look_at(self, row: _Row) -> None:
        """Compare a unit's sums before they are overwritten."""
        if row.used:
            self._await_hits()
            row.differs.logical_or_((row.sums[1:] != row.sums[0]).any())
            row.used = 0

    def _look_at_all(self) -> None:
        """Compare all sums; those of hits that have not been yet are as gathered, or seen before.

        The next gather across nodes, which overwrites them, waits until they have been read.
        """
        self._await_hits()
        self._differ.logical_or_((self._sums[:, 1:] != self._sums[:, :1]).any(1))
        self._streams.inter_node.wait_stream(self._streams.current())
        for row in self._of.values():
            row.used = 0

    def _await_hits(self) -> None:
        """Order the current stream after hits of ``unshard(async_op=True)`` that nobody awaits."""
        self._streams.current().wait_stream(self._streams.intra_node)

    def poll(self) -> list[bool]:
        """List per unit whether a mismatch has become known, and ask for the next copy.

        Called once per pass, before its first gather, on the stream of the gathers.
        """
        if not self.detects:
            return [False] * len(self._of)
        if self._streams.on_host:
            self._look_at_all()
            return self._differ.tolist()
        differ = [False] * len(self._of)
        if self._landed is not None:
            if not self._landed.query() and not self._late:
                self._late = True
                return differ
            # The device is more than a pass behind: later would be later than is promised.
            self._landed.synchronize()
            differ = self._landing.tolist()
        self._ask()
        return differ

    def check(self, units: Set[Unit]) -> tuple[list[bool], list[bool]]:
        """List per unit whether it is one of ``units`` and its own shard is other than gathered.

        And, as ``poll`` does, whether a mismatch has become known. All of it is known when this
        returns: the host waits for the device, once.
        """
        sums = [
            self._sum(unit.shard(self._sums.device)) if unit in units else row.held
            for unit, row in self._of.items()
        ]
        self._look_at_all()
        written = torch.stack(sums) != torch.stack([row.held for row in self._of.values()])
        known = torch.stack([written, self._differ]).tolist()
        return known[0], known[1]

    def land(self) -> None:
        """Wait until all that was compared so far is known."""
        if not self._streams.on_host:
            if self._landed is not None:
                self._landed.synchronize()  # the copy before reads what ``_ask`` replaces
            self._ask()
            self._landed.synchronize()

    def _ask(self) -> None:
        self._look_at_all()
        # A copy of them: what is compared next does not wait for the copies to the host before. The
        # last of these has landed.
        self._asked.copy_(self._differ)
        stream = self._streams.copies_out
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            self._landing.copy_(self._asked, non_blocking=True)
            self._landed = stream.record_event()
        self._late = False

    def forget(self) -> None:
        """Begin anew, after a mismatch: all units will be gathered again."""
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        self._sums[:, 1:] = self._sums[:, :1]
        self._differ.zero_()
