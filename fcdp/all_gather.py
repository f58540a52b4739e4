"""The cached all-gather: across nodes when a unit has changed, from the cache when it has not.

Two transports carry out what :class:`fcdp.pass_controller.PassController` decides: ``DeviceGather``
queues a gather on an accelerator's streams, ``HostGather`` exchanges messages on the CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fcdp.cache.cache import Cache, Entry
from fcdp.counts import Ledger, Phase, in_backward, profiled
from fcdp.exchange import (
    PARTS_MOST,
    Pending,
    all_gather,
    ring_bytes,
    swap_rows,
    wait_all,
)
from fcdp.failure import Exchanges
from fcdp.fsdp2 import AllGather, forget_gather
from fcdp.guard import Guard
from fcdp.hooks import GatherHook
from fcdp.pass_controller import Decision, PassController
from fcdp.streams import Slice, Slices, Streams, rows_as

#: Returns exchanges that it has begun, or ``None``.
_Continuation = Callable[[], Sequence[Pending] | None]


@dataclass(frozen=True)
class Shared:
    """Parts of one engine that all its gathers share."""

    controller: PassController
    cache: Cache
    guard: Guard
    streams: Streams
    slices: Slices
    ledger: Ledger
    #: The user's collective inside the node; ``None``: this library's.
    intra_node: AllGather | None


@dataclass(eq=False, slots=True)
class Gather:
    """One gather under way."""

    #: (nodes·L·s), in FSDP2's rank order.
    output: torch.Tensor
    #: This rank's row of it (s), which holds its shard.
    own: torch.Tensor
    phase: Phase
    decision: Decision


class CachedAllGather(AllGather):
    """FSDP2's all-gather of one unit, rank order kept: output is (nodes, L, shard numel).

    A stale unit: this rank gathers the shards of its ``local_rank`` from all nodes, the slice
    (nodes, s), 1/L of the unit, by one collective. The cache takes a copy of it, and the node's
    ranks gather the unit from their slices, by one more. A fresh unit: the slice comes from the
    cache (paper: FCDP-Sched; nothing crosses nodes).

    With flat exchanges a stale unit is gathered whole from all ranks, by one collective instead of
    two, and a fresh one as above. With a hook, shards cross nodes as it encodes them.
    """

    def __init__(
        self,
        entry: Entry,
        shared: Shared,
        hook: GatherHook | None,
        *,
        world: dist.ProcessGroup | None,
    ) -> None:
        """``world`` are the ranks of flat exchanges; ``None``: these are hierarchical."""
        self._entry = entry
        self._unit = entry.unit
        self._hook = hook
        self._topology = topology = entry.unit.topology
        self._failures = topology.failures
        self._exchanges = topology.exchanges
        self._controller = shared.controller
        self._cache = shared.cache
        self._guard = shared.guard
        self._streams = shared.streams
        self._slices = shared.slices
        self._ledger = shared.ledger
        self._world = world
        self._intra_node = shared.intra_node
        #: This rank's place in the output.
        self._place = topology.node * topology.ranks_per_node + topology.local_rank
        #: The stream that the output is allocated on, and filled with the own shard.
        self._copy_in: Any = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate FSDP2's output buffer, on its copy-in stream."""
        self._copy_in = self._streams.current()
        if self._intra_node is not None:
            return self._intra_node.allocate(size, dtype=dtype, device=device)
        return torch.empty(*size, dtype=dtype, device=device)

    def _begin(self, output: torch.Tensor, shard: torch.Tensor) -> Gather:
        """Let the ranks decide together what this gather is, before any of its exchanges."""
        phase: Phase = "backward" if in_backward() else "forward"
        if phase == "backward":
            self._failures.backward_runs()
        nbytes = shard.nbytes
        resized = nbytes != self._unit.shard_bytes
        # A cast of plain parameters beside packed ones resizes a unit, too.
        if resized and self._unit.packed and nbytes != (due := self._unit.bytes_due()):
            raise RuntimeError(
                f"{self._unit.name}: its gather extensions return {nbytes} bytes per rank, "
                f"and returned {due} at set-up; fsdp_pre_all_gather must return "
                "tensors of the same sizes at each gather"
            )
        decision = self._controller.before_gather(self._entry, phase, resized=resized)
        own = shard
        if shard.data_ptr() != output.data_ptr() + self._place * nbytes:
            # FSDP2 has not copied it to its place in the output.
            own = output.view(self._topology.world_size, -1)[self._place]
            own.copy_(shard)
        return Gather(output, own, phase=phase, decision=decision)

    def _load(self, gather: Gather) -> Slice:
        """Take the slice of a hit from the cache."""
        self._ledger.hits += 1
        self._slices.drain()  # those of forward, which a backward without misses does not use anew
        self._guard.compare(self._unit, gather.own)  # which a CPU has just written, and still holds
        held = self._cache.load(self._entry, gather.phase, output=gather.output, home=self._copy_in)
        if self._hook is not None:
            self._hook.hit(gather.own)
        self._cache.expect(gather.decision.coming)
        return held

    def _prepare(self, gather: Gather) -> Slice:
        """Return the slice for what crosses nodes."""
        self._ledger.misses += 1
        self._cache.staging.drain()
        output, topology = gather.output, self._topology
        received = self._slices.take_for(output, topology, self._copy_in, with_own=True)
        if self._hook is not None:
            difference = gather.decision.difference
            self._hook.prepare(received, gather.phase, difference=difference)
        return received

    def _encode(self, gather: Gather, received: Slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what this rank sends (k), and where messages arrive, a row of k or more per node.

        Without a hook the shard itself, and the slice.
        """
        own = gather.own
        self._guard.remember(self._unit, own)  # before a codec rounds it
        encoded = own, received.memory
        if self._hook is not None:
            encoded = self._hook.encode(own, received)
        self._ledger.add("inter_node", gather.phase, (self._topology.nodes - 1) * encoded[0].nbytes)
        return encoded

    def _gather_flat(self, gather: Gather, world: dist.ProcessGroup) -> Sequence[Pending]:
        """Gather the unit from all ranks at once."""
        self._guard.remember(self._unit, gather.own)
        self._ledger.add_both(gather.phase, *ring_bytes(gather.own.nbytes, self._topology))
        with self._exchanges:
            return all_gather([gather.output], world, [gather.own], ring=True)

    def _store(self, gather: Gather, received: Slice) -> None:
        """Offer the cache what has arrived, and fetch ahead what is going to be read next."""
        self._cache.outdate(self._entry)
        if gather.decision.keep:
            self._cache.store(self._entry, received, gather.phase)
            if self._hook is not None:
                self._hook.stored(gather.own)
        else:
            self._cache.pass_over(self._entry)
        # After the store: the first gather of backward may be that of the unit just stored.
        self._cache.expect(gather.decision.coming)

    def _parts(self, gather: Gather) -> Sequence[torch.Tensor]:
        """Split a gather's output into the nodes' parts (L·s), in FSDP2's rank order."""
        topology = self._topology
        size = topology.ranks_per_node * gather.own.numel()
        # The host's fastest way. The parts are no views to autograd and to functionalization, which
        # see no gather.
        return gather.output.unsafe_split_with_sizes([size] * topology.nodes)

    def _gather_in_node(
        self,
        gather: Gather,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[Pending]:
        """Gather all nodes' parts inside the node, as :func:`fcdp.exchange.all_gather` does.

        Without ``inputs`` this rank's part of each is in its place already.
        """
        topology, custom = self._topology, self._intra_node
        group, ranks = topology.intra, topology.ranks_per_node
        if ranks == 1:
            return []
        sent = topology.nodes * (ranks - 1) * gather.own.nbytes
        self._ledger.add("intra_node", gather.phase, sent)
        with profiled("gather_intra", self._unit.name), self._exchanges:
            if custom is None:
                return all_gather(outputs, group, inputs, ring=True)
            if inputs is None:
                inputs = [each.view(group.size(), -1)[group.rank()] for each in outputs]
            on_host = self._streams.on_host
            works = [
                custom(output_tensor=output, input_tensor=row, group=group, async_op=on_host)
                for output, row in zip(outputs, inputs, strict=True)
            ]
            return [work for work in works if work is not None]


class DeviceGather(CachedAllGather):
    """The gather of one unit on an accelerator: everything is queued when the call returns.

    FSDP2 fills this rank's row of the output on its copy-in stream, and frees the output in the
    order of its own streams. The inter-node all-gather runs on a stream and a communicator of its
    own, ahead of the gathers inside the node, and waits for that copy-in alone. It writes to a
    slice from :class:`fcdp.streams.Slices`; copies to the host read the slice and never FSDP2's
    output, unless one rank per node makes them the same. The intra-node all-gather alone writes to
    the output, on the stream that FSDP2 calls on; a flat one on the stream of gathers across nodes.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Queue the gather in the order of the current stream, or, with ``async_op``, of the work.

        FSDP2 then calls on the computing stream, which must not wait before the work is waited for.
        """
        streams = self._streams
        gather = self._begin(output_tensor, input_tensor)
        if not async_op:
            self._queue(gather)
            return None
        stream = streams.intra_node
        stream.wait_stream(streams.current())
        with streams.on(stream):
            self._queue(gather)
            return Queued(streams, stream.record_event())

    def _queue(self, gather: Gather) -> None:
        if self._topology.nodes == 1:
            self._gather_in_node(gather, [gather.output])
        elif gather.decision.hit:
            held = self._load(gather)
            self._queue_in_node(gather, held)
            self._cache.staging.release(held)
        else:
            received = self._prepare(gather)
            self._queue_across(gather, received)
            self._store(gather, received)
            if self._world is None:
                self._queue_in_node(gather, received)
            else:
                self._streams.current().wait_stream(self._streams.inter_node)
            self._slices.release(received)

    def _queue_across(self, gather: Gather, received: Slice) -> None:
        """Gather this ``local_rank``'s shards from all nodes into the slice; flat, the output."""
        stream, topology = self._streams.inter_node, self._topology
        stream.wait_stream(self._copy_in)
        with profiled("gather_inter", self._unit.name), self._streams.on(stream):
            # No wait for the slice: it is new, and its home is this stream or the one waited for.
            if self._world is not None:
                self._gather_flat(gather, self._world)
                if topology.ranks_per_node > 1:  # else the slice is the output
                    received.memory.copy_(self._by_node(gather.output)[:, topology.local_rank])
            else:
                outgoing, messages = self._encode(gather, received)
                if missing := messages.shape[1] - outgoing.numel():
                    outgoing = F.pad(outgoing, (0, missing))
                with self._exchanges:
                    all_gather([messages.view(-1)], topology.inter, [outgoing])
                if self._hook is not None:
                    self._hook.decode(messages, received)
            received.access.note_write(stream)

    def _queue_in_node(self, gather: Gather, part: Slice) -> None:
        """Gather inside the node, each node's part from one row of a slice."""
        topology, stream = self._topology, self._streams.current()
        part.access.written_for(stream)
        if topology.ranks_per_node == 1:
            if part.own_row is not None:
                return  # the slice is the output
            for places, rows in self._others(self._by_node(gather.output), part):
                places[:, 0].copy_(rows)
        elif topology.nodes > PARTS_MOST:
            self._queue_by_rank(gather, part)
        else:
            inputs = part.rows(topology.node, gather.own)
            self._gather_in_node(gather, self._parts(gather), inputs)
        part.access.note_read(stream)

    def _queue_by_rank(self, gather: Gather, part: Slice) -> None:
        """Gather the other nodes' parts rank by rank, in at most two runs, and put them in order.

        The host's time does not grow with the nodes; a copy of the unit moves on the device.
        """
        by_node = self._by_node(gather.output)
        runs = self._others(by_node, part)
        ranks, dtype, device = by_node.shape[1], by_node.dtype, by_node.device
        arrived = [
            torch.empty((ranks, *rows.shape), dtype=dtype, device=device) for _, rows in runs
        ]
        outputs = [table.view(-1) for table in arrived]
        inputs = [rows.view(-1) for _, rows in runs]
        outputs.append(by_node[self._topology.node].view(-1))
        self._gather_in_node(gather, outputs, [*inputs, gather.own])
        for (places, _), table in zip(runs, arrived, strict=True):
            places.copy_(table.transpose(0, 1))

    def _others(
        self, by_node: torch.Tensor, part: Slice
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the places (k, L, s) of the nodes below and above this one with a slice's rows."""
        node, rows = self._topology.node, rows_as(by_node.dtype, part.memory)
        above = node if part.own_row is None else node + 1
        pairs = ((by_node[:node], rows[:node]), (by_node[node + 1 :], rows[above:]))
        return [pair for pair in pairs if pair[1].shape[0]]

    def _by_node(self, output: torch.Tensor) -> torch.Tensor:
        """View the output as (n, L, s); each view costs a microsecond, so not before it is used."""
        return output.view(self._topology.nodes, self._topology.ranks_per_node, -1)


class HostGather(CachedAllGather):
    """The gather of one unit on the CPU, whose slice is a view of FSDP2's output.

    The first exchange is under way when the call returns, whatever ``async_op`` says: FSDP2 waits
    for the returned work where it needs the parameters, so that what it prefetches travels while it
    computes.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Begin the gather; it has ended when the returned work has been waited for."""
        gather = self._begin(output_tensor, input_tensor)
        works: Sequence[Pending]
        then: _Continuation | None = None
        if self._topology.nodes > 1 and not gather.decision.hit:
            works, then = self._exchange_across(gather, self._prepare(gather))
        else:
            if gather.decision.hit:
                self._load(gather)
            works = self._gather_in_node(gather, self._parts(gather))
        forget = partial(forget_gather, self._unit.group)
        return Gathering(works, then, exchanges=self._exchanges, forget=forget)

    def _exchange_across(
        self, gather: Gather, received: Slice
    ) -> tuple[Sequence[Pending], _Continuation]:
        """Begin to receive the other nodes' shards; return what to wait for, and what follows."""
        with profiled("gather_inter", self._unit.name):
            if self._world is not None:
                works = self._gather_flat(gather, self._world)
                return works, partial(self._store, gather, received)
            outgoing, messages = self._encode(gather, received)
            with self._exchanges:
                works = swap_rows([messages], [outgoing], self._topology.inter)
        if self._hook is not None:
            works = self._hook.sent(works)
        return works, partial(self._go_on, gather, received, messages)

    def _go_on(self, gather: Gather, received: Slice, messages: torch.Tensor) -> Sequence[Pending]:
        """Go on with a gather whose messages from other nodes have arrived."""
        if self._hook is not None:
            self._hook.decode(messages, received)
        self._store(gather, received)
        return self._gather_in_node(gather, self._parts(gather))


class Gathering(dist.Work):
    """A gather under way on the CPU: exchanges to wait for, and those that may follow them."""

    def __init__(
        self,
        works: Sequence[Pending],
        then: _Continuation | None,
        *,
        exchanges: Exchanges,
        forget: Callable[[], None],
    ) -> None:
        """``then`` is called once ``works`` have ended, and may begin more exchanges.

        ``forget`` has FSDP2 gather anew what this gather did not bring.
        """
        super().__init__()
        self._works: Sequence[Pending] | None = works
        self._then = then
        self._exchanges = exchanges
        self._forget = forget
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
                with self._exchanges:
                    wait_all(works)
                if self._then is not None:
                    then, self._then = self._then, None
                    self._works = then()
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
