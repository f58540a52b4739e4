"""Differences on an accelerator, where the host must know all sizes before a gather begins.

Before a pass each rank counts, on the device, what its shards' differences take in each form. The
nodes exchange the counts of all units at once and the host reads them: its one wait, or one for
each mesh that units are on. All ranks then know which form is the smallest and how long each
message is, and gathers follow as they do without differences. Codes are those of
:mod:`fcdp.delta.difference`, of a whole shard at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fcdp.cache.cache import Entry
from fcdp.checksum import sum_of_words
from fcdp.delta.message import low_and_high, packed
from fcdp.delta.packing import GRANULE, Codes, pack_flags, unpack_flags
from fcdp.delta.sent import Base
from fcdp.exchange import all_gather
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit

#: Two-bit codes without the words that are zero, codes of so many bits, and words as they are.
_SPARSE, _RAW = 1, 16
_CODES = {_SPARSE: Codes(2), 2: Codes(2), 4: Codes(4), 8: Codes(8)}
#: Rows begin where their checksums can be read, and end so.
_ALIGNED = 8


class Counts(NamedTuple):
    """Counts that give the size of one shard's difference in each form."""

    #: Words of two-bit codes that are not zero.
    some: int
    #: Numbers that codes of two, four and eight bits do not hold; and that no byte holds.
    two: int
    four: int
    eight: int
    wide: int

    def parts(self, form: int, numel: int) -> list[int]:
        """Bytes of a difference of ``numel`` words: flags, codes, wide numbers and near ones."""
        if form == _RAW:
            return [0, 2 * numel, 0, 0]
        full = -(-numel // GRANULE) * GRANULE
        if form == _SPARSE:
            return [full // 64, 2 * self.some, 2 * self.wide, self.two]
        near = {2: self.two, 4: self.four, 8: self.eight}[form]
        return [0, full * form // 8, 2 * self.wide, near]


def count(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Compute the :class:`Counts` (5, int64) of the difference from ``base`` (n) to ``new`` (n)."""
    numbers = _numbers(new, base)
    flags = [_CODES[form].escapes(numbers) for form in (2, 4, 8)]
    flags = [numbers.view(-1, 8).any(1), *flags, numbers.to(torch.int8) != numbers]
    return torch.stack([each.sum() for each in flags])


class Encoding(NamedTuple):
    """The encoding of one unit's differences on all nodes, known to every rank of a gather."""

    #: Version that the differences lead to.
    generation: int
    #: Bits of a code, ``_SPARSE`` or ``_RAW``.
    form: int
    #: By node.
    counts: Sequence[Counts]

    @classmethod
    def smallest(cls, generation: int, counts: Sequence[Counts], numel: int) -> Encoding:
        """Choose the form in which the longest message is the shortest."""

        def most(form: int) -> int:
            return max(sum(each.parts(form, numel)) for each in counts)

        return cls(generation, min((*_CODES, _RAW), key=most), counts)

    def row_bytes(self, shard: torch.Tensor) -> int:
        """Bytes of each node's message: a checksum, bytes sent as they are, and the difference."""
        numel = shard.numel()
        most = max(sum(each.parts(self.form, numel)) for each in self.counts)
        nbytes = _ALIGNED + (shard.itemsize - 2) * numel + most
        return nbytes + -nbytes % _ALIGNED

    def write(self, new: torch.Tensor, base: torch.Tensor, node: int) -> torch.Tensor:
        """Return the message (uint8) of this rank's ``new`` (n); the host waits for nothing."""
        low, high = low_and_high(new.view(torch.int16), new.itemsize)
        coded = self._coded(packed(high), _numbers(new, base), node)
        parts = [sum_of_words(new).view(1), packed(low), *coded]
        message = torch.cat([part.view(torch.uint8) for part in parts])
        return F.pad(message, (0, self.row_bytes(new) - message.numel()))

    def read(self, message: torch.Tensor, row: torch.Tensor, node: int) -> torch.Tensor:
        """Apply a node's message to ``row`` (n); return whether its checksum is wrong (bool)."""
        low, high = low_and_high(row.view(torch.int16), row.itemsize)
        sizes = [_ALIGNED, low.numel() * 2, *self.counts[node].parts(self.form, row.numel())]
        checksum, as_is, *parts = message[: sum(sizes)].split(sizes)
        low.copy_(as_is.view(torch.int16).view(low.shape))
        flags, codes, wide, near = parts
        if self.form == _RAW:
            high.copy_(codes.view(torch.int16))
        else:
            words = codes.view(torch.int16)
            if self.form == _SPARSE:
                words = _spread(words, unpack_flags(flags))
            numbers = _CODES[self.form].unpack(words)
            escaped = numbers == -_CODES[self.form].limit
            far = near.view(torch.int8) == 0
            known = near.view(torch.int8).to(torch.int16) + _spread(wide.view(torch.int16), far)
            numbers = numbers.masked_fill_(escaped, 0).add_(_spread(known, escaped))
            high.add_(numbers[: row.numel()])
        return sum_of_words(row).ne(checksum.view(torch.int64)[0])

    def _coded(self, high: torch.Tensor, numbers: torch.Tensor, node: int) -> list[torch.Tensor]:
        if self.form == _RAW:
            return [high]
        _, codes_bytes, wide_bytes, near_bytes = self.counts[node].parts(self.form, high.numel())
        codes = _CODES[self.form]
        words = codes.pack(numbers)
        escaped = _where(numbers, codes.escapes(numbers), near_bytes)
        near = escaped.to(torch.int8)
        far = near != escaped
        parts = [words, _where(escaped, far, wide_bytes // 2), near.masked_fill_(far, 0)]
        if self.form == _SPARSE:
            flags = words != 0
            parts[:1] = [pack_flags(flags), _where(words, flags, codes_bytes // 2)]
        return parts


class Encodings:
    """Encodings of the differences that all nodes are about to send."""

    def __init__(self, bases: Sequence[Base], streams: Streams) -> None:
        self._bases = bases
        self._streams = streams
        self._known: dict[Unit, Encoding] = {}
        #: Whether a message has led to a wrong checksum on this rank, in the shape of counts.
        self._wrong = torch.zeros(len(Counts._fields), dtype=torch.int64, device=streams.device)
        nodes = max(base.entry.unit.topology.nodes for base in bases)
        most = nodes * (len(bases) + 1) * self._wrong.numel()
        # Page-locked where there is an accelerator, or the copy would block the host.
        pinned = streams.device.type == "cuda"
        self._landing = torch.zeros(most, dtype=torch.int64, device="cpu", pin_memory=pinned)

    def learn(self) -> None:
        """Exchange the counts of what has changed, once the ranks have agreed on that.

        Raises ``RuntimeError`` if a message since the last time led to a wrong checksum.
        """
        coming: dict[Topology, list[Base]] = {}
        for base in self._bases:
            entry = base.entry
            if entry.based and not entry.fresh and not self._knows(entry):
                coming.setdefault(entry.unit.topology, []).append(base)
        for topology, bases in coming.items():
            self._learn(topology, bases)

    def _learn(self, topology: Topology, coming: Sequence[Base]) -> None:
        """Exchange the counts of units that are sharded over the same ranks."""
        stream, nodes = self._streams.inter_node, topology.nodes
        stream.wait_stream(self._streams.current())
        with self._streams.on(stream):
            device = self._streams.device
            rows = [count(base.entry.unit.shard(device), base.memory) for base in coming]
            mine = torch.stack([self._wrong, *rows])
            table = mine.new_empty((nodes, *mine.shape))
            with topology.exchanges:
                all_gather([table.view(-1)], topology.inter, [mine.view(-1)])
            landing = self._landing[: table.numel()]
            landing.copy_(table.view(-1), non_blocking=True)
            landed = stream.record_event()
            self._wrong.zero_()
        landed.synchronize()
        gathered = torch.tensor(landing.tolist(), device="cpu").view(table.shape)
        if gathered[:, 0].any():
            raise RuntimeError(
                "a difference between versions of a shard led to another checksum: damaged on its "
                "way, or parameters were written during a pass; results since the last step are "
                "wrong: go on from the last checkpoint"
            )
        for base, counts in zip(coming, gathered[:, 1:].unbind(1), strict=True):
            entry = base.entry
            by_node = [Counts._make(each) for each in counts.tolist()]
            encoding = Encoding.smallest(entry.generation, by_node, entry.unit.shard_numel)
            self._known[entry.unit] = encoding

    def of(self, entry: Entry) -> Encoding:
        """Return the encoding of an entry that has changed."""
        assert self._knows(entry), f"{entry.unit.name}: nothing was counted"
        return self._known[entry.unit]

    def note(self, wrong: torch.Tensor) -> None:
        """Note, in the order of the current stream, whether a message led to a wrong checksum."""
        self._wrong += wrong

    def _knows(self, entry: Entry) -> bool:
        known = self._known.get(entry.unit)
        return known is not None and known.generation == entry.generation


def _numbers(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The difference of two shards' highest words, filled up to a whole granule."""
    (_, now), (_, before) = (
        low_and_high(each.view(torch.int16), each.itemsize) for each in (new, base)
    )
    return F.pad(now - before, (0, -now.numel() % GRANULE))


def _where(values: torch.Tensor, flags: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``values`` (n) of the ``count`` set flags, in order; others if fewer are set."""
    at = torch.nonzero_static(flags, size=count, fill_value=0).view(-1)
    return values.index_select(0, at)


def _spread(values: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
    """One of ``values`` after the other where ``flags`` (n) are set, and zeros elsewhere.

    A damaged message may set more flags than there are values.
    """
    if not values.numel():
        return values.new_zeros(flags.numel())
    at = flags.cumsum(0).sub_(1).clamp_(0, values.numel() - 1)
    return values.index_select(0, at).masked_fill_(~flags, 0)
