"""Differences in gathers: what the ranks agree on, and how one unit's shards cross nodes."""

from collections.abc import Sequence

import torch

from fcdp.cache.cache import Entry
from fcdp.counts import Phase
from fcdp.delta import message
from fcdp.delta.economy import Economy, Watch, When
from fcdp.delta.on_device import Encoding, Encodings
from fcdp.delta.sent import Base, Sent
from fcdp.exchange import Pending
from fcdp.hooks import EngineParts, GatherHook
from fcdp.streams import Slice
from fcdp.unit import Unit

#: Bytes that each node's message begins at a multiple of, as it is read as numbers.
_ALIGNED = 64


class Differences:
    """Differences of one engine's gathers: a :class:`fcdp.hooks.GatherExtension`.

    Ranks vote whether their link has become faster, so that it is learned anew, and whether any of
    them would send a difference; else nothing is kept of what is sent.
    """

    def __init__(self, when: When, parts: EngineParts) -> None:
        self._economy = Economy(when)
        entries = parts.entries
        self._bases: dict[Unit, Base] = {}
        self._encodings = None
        self._hooks: dict[Unit, GatherHook] = {}
        if parts.streams.on_host:
            for unit, entry in entries.items():
                sent = self._bases[unit] = Sent(entry, self._economy)
                self._hooks[unit] = HostDifferences(self, sent, parts)
            return
        self._bases = {unit: Base(entry) for unit, entry in entries.items()}
        self._encodings = encodings = Encodings([*self._bases.values()], parts.streams)
        for unit, base in self._bases.items():
            self._hooks[unit] = DeviceDifferences(self, base, parts, encodings=encodings)

    def hook(self, unit: Unit) -> GatherHook:
        return self._hooks[unit]

    def votes(self) -> list[bool]:
        send = [base.would_send() for unit, base in self._bases.items() if unit.trainable]
        return [self._economy.faster, any(send)]

    def agreed(self, votes: Sequence[bool]) -> None:
        faster, sending = votes
        if faster:
            self._economy.measure_again()
        for base in self._bases.values():
            base.sending = sending
        if self._encodings is not None:
            self._encodings.learn()

    def lacks_base(self, unit: Unit) -> bool:
        return not self._bases[unit].usable

    def wants(self, unit: Unit) -> bool:
        return self._bases[unit].sending and unit.trainable


class _Hook:
    """State and methods that differences on the CPU and on accelerators have in common."""

    def __init__(self, differences: Differences, entry: Entry, parts: EngineParts) -> None:
        self._differences = differences
        self._entry = entry
        self._cache = parts.cache
        self._topology = topology = entry.unit.topology
        self._peers = [peer for peer in range(topology.nodes) if peer != topology.node]
        #: Whether the shard of the gather under way is kept as it is sent.
        self._keeps = False

    def hit(self, own: torch.Tensor) -> None:
        """Leave the shard as it is: nothing was rounded."""

    def _note_wish(self) -> None:
        """Note now whether the shard is kept: the ranks may agree again before it has arrived."""
        self._keeps = self._differences.wants(self._entry.unit)


class HostDifferences(_Hook):
    """Differences of one unit on the CPU, whose messages say themselves how long they are."""

    def __init__(self, differences: Differences, sent: Sent, parts: EngineParts) -> None:
        super().__init__(differences, sent.entry, parts)
        self._sent = sent
        #: The shard of the gather under way, its message if that is a difference, and the exchange.
        #: Those of one that has ended would keep FSDP2's output in memory.
        self._own: torch.Tensor | None = None
        self._outgoing: torch.Tensor | None = None
        self._watch = Watch([])

    def prepare(self, received: Slice, phase: Phase, *, difference: bool) -> None:
        self._note_wish()
        self._difference, self._phase = difference, phase
        if not difference:
            self._sent.forget()
            return
        # An entry that may be lost is read now: other units' gathers come before this one's end.
        self._ahead = self._entry.fallible
        if self._ahead:
            self._cache.load_stale(self._entry, phase, received)

    def encode(self, own: torch.Tensor, received: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        self._own, self._outgoing = own, None  # of one that was interrupted, too
        if not self._difference:
            return own, received.memory
        outgoing = self._outgoing = self._sent.write(own)
        most = message.most_bytes(own)
        nodes = self._topology.nodes
        room = torch.empty((nodes, most + -most % _ALIGNED), dtype=torch.uint8, device="cpu")
        return outgoing, room

    def sent(self, works: Sequence[Pending]) -> Sequence[Pending]:
        self._watch = Watch(works)
        return [self._watch]

    def decode(self, messages: torch.Tensor, received: Slice) -> None:
        own, self._own = self._own, None
        outgoing, self._outgoing = self._outgoing, None
        watch, self._watch = self._watch, Watch([])
        assert own is not None, "encoded before"
        if outgoing is None:
            self._sent.saw(watch, own, whole=True, written=False)
            return
        arrived = [messages[peer] for peer in self._peers]
        arrived_whole = all(map(message.is_whole, arrived))
        self._sent.saw(watch, own, whole=arrived_whole and message.is_whole(outgoing))
        if not (self._ahead or arrived_whole):
            self._cache.load_stale(self._entry, self._phase, received)
        for peer in self._peers:
            self._sent.read(messages[peer], received.memory[peer])

    def stored(self, own: torch.Tensor) -> None:
        if self._keeps:
            self._sent.keep(own)


class DeviceDifferences(_Hook):
    """Differences of one unit on an accelerator, whose sizes the ranks learn before a pass."""

    def __init__(
        self, differences: Differences, base: Base, parts: EngineParts, *, encodings: Encodings
    ) -> None:
        super().__init__(differences, base.entry, parts)
        self._base = base
        self._encodings = encodings
        self._streams = parts.streams
        self._encoding: Encoding | None = None

    def prepare(self, received: Slice, phase: Phase, *, difference: bool) -> None:
        self._note_wish()
        self._base.forget()
        self._encoding = self._encodings.of(self._entry) if difference else None
        if difference:
            self._cache.load_stale(self._entry, phase, received)

    def encode(self, own: torch.Tensor, received: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        if self._encoding is None:
            return own, received.memory
        outgoing = self._encoding.write(own, self._base.memory, self._topology.node)
        return outgoing, outgoing.new_empty((self._topology.nodes, outgoing.numel()))

    def sent(self, works: Sequence[Pending]) -> Sequence[Pending]:
        raise AssertionError("an accelerator waits for nothing")

    def decode(self, messages: torch.Tensor, received: Slice) -> None:
        if self._encoding is not None:
            for peer in self._peers:
                self._encodings.note(
                    self._encoding.read(messages[peer], received.memory[peer], peer)
                )

    def stored(self, own: torch.Tensor) -> None:
        if not self._keeps:
            return
        with self._streams.on(self._streams.inter_node):
            self._base.keep(own)
        # FSDP2 frees what it was copied from in the order of the current stream.
        self._streams.current().wait_stream(self._streams.inter_node)
