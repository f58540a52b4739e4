"""The cached all-gather: across nodes when a unit has changed, from the cache when it has not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fcdp.cache.cache import Cache
from fcdp.cache.entry import Entry, Slice, Slices
from fcdp.codec import Codec
from fcdp.counts import Ledger, Phase, in_backward, profiled
from fcdp.delta import message
from fcdp.delta.economy import Watch
from fcdp.delta.on_device import Sizes
from fcdp.delta.sent import Base, Sent
from fcdp.exchange import (
    PARTS_MOST,
    Pending,
    all_gather,
    ring_all_gather,
    ring_bytes,
    swap,
    wait_all,
)
from fcdp.failure import Failures
from fcdp.fsdp2 import AllGather, forget_gather
from fcdp.guard import Guard
from fcdp.staleness import Staleness
from fcdp.streams import Streams
from fcdp.topology import Topology

#: The exchanges that have to end before a gather goes on to its next part.
Parts = Iterator[Sequence[Pending]]


@dataclass(eq=False)
class CachedAllGather(AllGather):
    """FSDP2's all-gather of one unit, rank order kept: output is (nodes, L, shard numel).

    A stale unit: this rank gathers the shards of its ``local_rank`` from all nodes, the slice
    (nodes, s), 1/L of the unit, by one collective. The cache takes a copy of it, and the node's
    ranks gather the unit from their slices, by one more. A fresh unit: the slice comes from the
    cache (paper: FCDP-Sched; nothing crosses nodes).

    With flat exchanges a stale unit is gathered whole from all ranks, by one collective instead of
    two, and a fresh one as above.

    With a codec, shards cross nodes encoded, and the output has every shard, this rank's own
    included, as it decodes: all nodes compute with equal weights. The cache keeps decoded shards.

    Streams on an accelerator: FSDP2 fills this rank's row of the output on its copy-in stream, and
    frees the output in the order of its own streams. The inter-node all-gather runs on a stream
    and a communicator of its own, ahead of the gathers inside the node, and waits for that copy-in
    alone. It writes to a slice from :class:`fcdp.cache.entry.Slices`; copies to the host read the
    slice and never FSDP2's output, unless one rank per node makes them the same. The intra-node
    all-gather alone writes to the output, on the stream that FSDP2 calls on; a flat one does so on
    the stream of gathers across nodes.
    """

    entry: Entry
    topology: Topology
    cache: Cache
    slices: Slices
    staleness: Staleness
    guard: Guard
    streams: Streams
    ledger: Ledger
    codec: Codec | None
    #: Set where gathers send differences; ``sizes`` on an accelerator only.
    sent: Base | None
    sizes: Sizes | None
    #: Set where exchanges are flat.
    world: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        topology = self.topology
        self._unit = self.entry.unit
        self._peers = [node for node in range(topology.nodes) if node != topology.node]
        #: This rank's place in the output.
        self._place = topology.node * topology.ranks_per_node + topology.local_rank
        #: The stream that the output is allocated on, and filled with the own shard.
        self._copy_in: Any = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate FSDP2's output buffer, on its copy-in stream."""
        self._copy_in = self.streams.current()
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` (s) of all ranks into ``output_tensor`` (nodes·L·s).

        On an accelerator everything is queued when the call returns: in the order of the current
        stream, or, with ``async_op``, of the returned work. On the CPU the first exchange is under
        way, whatever ``async_op`` says: FSDP2 waits for the returned work where it needs the
        parameters, so that what it prefetches travels while it computes.
        """
        if input_tensor.nbytes != self._unit.shard_bytes:
            self.cache.drop_resized(self.entry)
        phase: Phase = "backward" if in_backward() else "forward"
        if phase == "backward":
            self.topology.failures.backward_runs()
        self.staleness.settle(self._unit)
        parts = self._parts(output_tensor, input_tensor, phase)
        if self.streams.on_host:
            forget = partial(forget_gather, self._unit.group)
            return Gathering(parts, self.topology.failures, forget)
        if not async_op:
            self._queue(parts)
            return None
        # FSDP2 called on the computing stream, which must not wait before the work is waited for.
        stream = self.streams.intra_node
        stream.wait_stream(self.streams.current())
        with self.streams.on(stream):
            self._queue(parts)
            return Queued(self.streams, stream.record_event())

    def _queue(self, parts: Parts) -> None:
        """Queue all parts of a gather, whose exchanges an accelerator orders by itself."""
        for works in parts:
            assert not works, "what is queued has nothing to wait for"

    def _parts(self, output: torch.Tensor, shard: torch.Tensor, phase: Phase) -> Parts:
        own = self._in_place(output, shard)
        if self.topology.nodes == 1:
            yield self._intra_node(output, None, own, phase)
            return
        coming = self.cache.note(self.entry)
        if self.cache.hit(self.entry):
            yield from self._from_cache(output, own, phase, coming)
        else:
            yield from self._across_nodes(output, own, phase, coming)

    def _in_place(self, output: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's row of the output, which holds ``shard``; FSDP2 copies it there."""
        if shard.data_ptr() == output.data_ptr() + self._place * shard.nbytes:
            return shard
        own = output.view(self.topology.world_size, -1)[self._place]
        own.copy_(shard)
        return own

    def _by_node(self, output: torch.Tensor) -> torch.Tensor:
        """View the output as (n, L, s); each view costs a microsecond, so not before it is used."""
        return output.view(self.topology.nodes, self.topology.ranks_per_node, -1)

    def _from_cache(
        self, output: torch.Tensor, own: torch.Tensor, phase: Phase, coming: Sequence[Entry]
    ) -> Parts:
        self.ledger.hits += 1
        self.slices.drain()  # forward's last; backward needs none
        with profiled("cache_load", self._unit.name):
            held = self.cache.load(self.entry, phase, output, self._copy_in)
        self.guard.compare(self._unit, own)
        self._encode(own)
        self.cache.expect(coming)
        yield self._intra_node(output, held, own, phase)
        self.cache.staging.release(held)

    def _across_nodes(
        self, output: torch.Tensor, own: torch.Tensor, phase: Phase, coming: Sequence[Entry]
    ) -> Parts:
        self.ledger.misses += 1
        self.cache.staging.drain()
        received = self.slices.take_for(output, self.topology, self._copy_in, own=True)
        # The base of differences while ranks send any; the same on every rank.
        sent = self.sent
        base = sent if sent is not None and sent.sending and self._unit.trainable else None
        if base is not None and self.cache.has_base(self.entry):
            if isinstance(base, Sent):
                yield from self._differences(base, received, own, phase)
            else:
                self._queue_differences(base, received, own, phase)
        else:
            if sent is not None:
                sent.forget()
            self.cache.outdate(self.entry)
            arriving, works = self._inter_node(output, received, own, phase)
            if works:  # on the CPU
                watch = Watch(works)
                yield [watch]
                if isinstance(sent, Sent):
                    sent.saw(watch, own, whole=True, written=False)
                self._decode(arriving, received)
        # Alike on every rank. The next gather's difference leads from this shard.
        resized = own.nbytes != self._unit.shard_bytes
        if not resized and (base is not None or self.cache.worth_keeping(self.entry)):
            with profiled("cache_store", self._unit.name):
                self.cache.store(self.entry, received, phase)
            if base is not None:
                with self.streams.on(self.streams.inter_node):
                    base.keep(own)
                # FSDP2 frees what it was copied from in the order of the current stream.
                self.streams.current().wait_stream(self.streams.inter_node)
        # After the store: the first gather of backward may be that of the unit just stored.
        self.cache.expect(coming)
        if self.world is None:
            yield self._intra_node(output, received, own, phase)
        else:
            self.streams.current().wait_stream(self.streams.inter_node)
        self.slices.release(received)

    def _differences(self, base: Sent, received: Slice, own: torch.Tensor, phase: Phase) -> Parts:
        """Load the other nodes' shards as last stored, and apply the differences that they send."""
        topology = self.topology
        self.entry.based = False  # until the ranks agree again
        # An entry that may be lost is read now: other units' gathers come before this one's end.
        ahead = self.cache.fallible(self._unit)
        if ahead:
            self.cache.load_stale(self.entry, phase, received)
        with profiled("gather_inter", self._unit.name):
            self.guard.remember(self._unit, own)
            outgoing = base.write(own)
            self.ledger.add("inter_node", phase, len(self._peers) * outgoing.nbytes)
            most = message.most_bytes(own)
            arriving = {
                peer: torch.empty(most, dtype=torch.uint8, device="cpu") for peer in self._peers
            }
            with topology.failures.waiting():
                works = swap(
                    [*arriving.items()], [(peer, outgoing) for peer in self._peers], topology.inter
                )
        watch = Watch(works)
        yield [watch]
        all_whole = all(map(message.is_whole, (outgoing, *arriving.values())))
        base.saw(watch, own, whole=all_whole)
        if not all_whole and not ahead:
            self.cache.load_stale(self.entry, phase, received)
        self.cache.outdate(self.entry)
        for peer, arrived in arriving.items():
            base.read(arrived, received.memory[peer])

    def _queue_differences(
        self, base: Base, received: Slice, own: torch.Tensor, phase: Phase
    ) -> None:
        """Do the same on an accelerator, where sizes are known and everything is queued."""
        assert self.sizes is not None
        encoding, node = self.sizes.of(self.entry), self.topology.node
        self.entry.based = False  # until the ranks agree again
        base.forget()
        self.cache.load_stale(self.entry, phase, received)
        stream = self.streams.inter_node
        stream.wait_stream(self._copy_in)
        with (
            profiled("gather_inter", self._unit.name),
            self.streams.on(stream),
            received.access.writing(stream),
        ):
            self.guard.remember(self._unit, own)
            outgoing = encoding.write(own, base.memory, node)
            self.ledger.add("inter_node", phase, len(self._peers) * outgoing.nbytes)
            arriving = outgoing.new_empty((self.topology.nodes, outgoing.numel()))
            with self.topology.failures.waiting():
                all_gather([arriving.view(-1)], self.topology.inter, [outgoing])
            for peer in self._peers:
                self.sizes.note(encoding.read(arriving[peer], received.memory[peer], peer))
        self.cache.outdate(self.entry)

    def _inter_node(
        self, output: torch.Tensor, received: Slice, own: torch.Tensor, phase: Phase
    ) -> tuple[torch.Tensor, Sequence[Pending]]:
        """Gather this ``local_rank``'s shards from all nodes into a slice; flat, the output too.

        Returns what arrives, a row per node, and what to wait for before it is decoded: on an
        accelerator nothing, as both are queued.
        """
        stream = self.streams.inter_node
        stream.wait_stream(self._copy_in)
        with (
            profiled("gather_inter", self._unit.name),
            self.streams.on(stream),
            received.access.writing(stream),
        ):
            self.guard.remember(self._unit, own)  # before a codec rounds the own shard
            if self.world is not None:
                self.ledger.add_both(phase, *ring_bytes(own.nbytes, self.topology))
                with self.topology.failures.waiting():
                    works = ring_all_gather(output, own, self.world)
                if received.home is not self._copy_in:  # the slice lies elsewhere
                    received.memory.copy_(self._by_node(output)[:, self.topology.local_rank])
                return received.memory, works
            outgoing = self._encode(own)
            self.ledger.add("inter_node", phase, len(self._peers) * outgoing.nbytes)
            arriving, numel = received.memory, outgoing.numel()
            if self.codec is not None:
                # Each has to begin at a multiple of four bytes.
                arriving = outgoing.new_empty((self.topology.nodes, numel + -numel % 4))
            with self.topology.failures.waiting():
                if self.streams.on_host:
                    return arriving, swap(
                        [(peer, arriving[peer, :numel]) for peer in self._peers],
                        [(peer, outgoing) for peer in self._peers],
                        self.topology.inter,
                    )
                if self.codec is not None:
                    outgoing = F.pad(outgoing, (0, -numel % 4))
                all_gather([arriving.view(-1)], self.topology.inter, [outgoing])  # queued
            self._decode(arriving, received)
            return received.memory, []

    def _decode(self, arriving: torch.Tensor, received: Slice) -> None:
        """Decode the other nodes' shards into the slice."""
        if self.codec is None:
            return
        for node, row in enumerate(received.memory.unbind()):
            if node != self.topology.node:
                encoded = arriving[node][: self.codec.encoded_bytes(row.numel())]
                self.codec.decode(encoded, row)

    def _encode(self, shard: torch.Tensor) -> torch.Tensor:
        """Encode this rank's shard, and round it in place to what the other nodes decode."""
        if self.codec is None:
            return shard
        encoded = self.codec.encode(shard)
        self.codec.decode(encoded, shard)
        return encoded

    def _intra_node(
        self, output: torch.Tensor, part: Slice | None, own: torch.Tensor, phase: Phase
    ) -> Sequence[Pending]:
        """Gather inside the node, each node's part from one row of a slice.

        ``part`` is ``None`` where there is one node.
        """
        nodes, ranks = self.topology.nodes, self.topology.ranks_per_node
        if ranks > 1:
            self.ledger.add("intra_node", phase, nodes * (ranks - 1) * own.nbytes)
        if part is None:
            return self._gather_in_node(output, None)
        in_place = part.own is not None and (ranks == 1 or self.streams.on_host)
        with part.access.reading(self.streams.current()):
            if in_place:
                return self._gather_in_node(output, None)
            if ranks == 1:
                for places, rows in self._others(self._by_node(output), part):
                    places[:, 0].copy_(rows)
                return []
            if nodes > PARTS_MOST and not self.streams.on_host:
                self._gather_by_rank(self._by_node(output), part, own)
                return []
            return self._gather_in_node(output, part.rows(self.topology.node, own))

    def _gather_in_node(
        self, output: torch.Tensor, rows: Sequence[torch.Tensor] | None
    ) -> Sequence[Pending]:
        """Gather each node's part into its place: parts arrive in FSDP2's rank order."""
        topology = self.topology
        if topology.ranks_per_node == 1:
            return []
        with profiled("gather_intra", self._unit.name), topology.failures.waiting():
            return all_gather(output.chunk(topology.nodes), topology.intra, rows)

    def _gather_by_rank(self, by_node: torch.Tensor, part: Slice, own: torch.Tensor) -> None:
        """Gather the other nodes' parts rank by rank, in at most two runs, and put them in order.

        The host's time does not grow with the nodes; a copy of the unit moves on the device.
        """
        runs = self._others(by_node, part)
        ranks, dtype, device = by_node.shape[1], by_node.dtype, by_node.device
        arrived = [
            torch.empty((ranks, *rows.shape), dtype=dtype, device=device) for _, rows in runs
        ]
        outputs = [table.view(-1) for table in arrived]
        inputs = [rows.view(-1) for _, rows in runs]
        with profiled("gather_intra", self._unit.name), self.topology.failures.waiting():
            all_gather(
                [*outputs, by_node[self.topology.node].view(-1)],
                self.topology.intra,
                [*inputs, own],
            )
        for (places, _), table in zip(runs, arrived, strict=True):
            places.copy_(table.transpose(0, 1))

    def _others(
        self, by_node: torch.Tensor, part: Slice
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the places (k, L, s) of the nodes below and above this one with a slice's rows."""
        node, rows = self.topology.node, part.memory.view(by_node.dtype)
        above = node if part.own is None else node + 1
        pairs = ((by_node[:node], rows[:node]), (by_node[node + 1 :], rows[above:]))
        return [pair for pair in pairs if pair[1].shape[0]]


class Gathering(dist.Work):
    """A gather under way on the CPU, and what follows its first exchange."""

    def __init__(self, parts: Parts, failures: Failures, forget: Callable[[], None]) -> None:
        """``forget`` has FSDP2 gather anew what this gather did not bring."""
        super().__init__()
        self._parts = parts
        self._failures = failures
        self._forget = forget
        self._works: Sequence[Pending] | None = next(parts)
        #: Exchanges that somebody interrupted: their memory must outlive them.
        self._abandoned: Sequence[Pending] = []

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the whole gather has ended, or was given up by an error in an earlier wait.

        FSDP2 waits again for what an error has interrupted, and a message that has arrived never
        arrives again.
        """
        while self._works is not None:
            works, self._works = self._works, None
            self._abandoned = works
            try:
                with self._failures.waiting():
                    wait_all(works)
                self._works = next(self._parts, None)
            except BaseException:
                self._forget()
                raise
        self._abandoned = []
        return True


class Queued(dist.Work):
    """A gather queued on a stream of its own."""

    def __init__(self, streams: Streams, done: Any) -> None:
        super().__init__()
        self._streams = streams
        self._done = done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order the current stream after the whole gather."""
        self._streams.current().wait_event(self._done)
        return True
