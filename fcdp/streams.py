"""The streams that one engine queues its transfers on, and the device memory that they order."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from fcdp.topology import Topology


class Streams:
    """Six streams of an accelerator, so that each kind of transfer has a queue of its own.

    :class:`Access` orders accesses to each piece of memory. On the CPU these are
    ``torch.cpu``'s streams, which order nothing.

    - ``inter_node``: all-gathers across nodes. They run ahead of the gathers inside the node, which
      FSDP2 queues on its own all-gather stream, and wait only for FSDP2's copy-in of their shard.
    - ``intra_node``: gathers inside the node for ``unshard(async_op=True)``, which FSDP2 calls on
      the computing stream.
    - ``copies_out``: from slices to tiers.
    - ``copies_in``: from tiers to slices, ahead of their gathers.
    - ``sums_in``, ``sums_out``: partial gradients from the host and back. FSDP2's stream of
      reductions goes on with the next unit meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        #: The device that transfers lead to and from.
        self.device = device
        #: Nothing is queued: tensors are on the CPU, and copies have ended when they return.
        self.on_host = device.type == "cpu"
        backend: Any = torch.get_device_module(device)
        # Before computation: a transfer that waits behind a kernel delays all that follow it.
        self.inter_node = backend.Stream(priority=-1)
        self.intra_node = backend.Stream(priority=-1)
        self.copies_out = backend.Stream()
        self.copies_in = backend.Stream()
        self.sums_in = backend.Stream()
        self.sums_out = backend.Stream()
        #: Returns the stream that operations are queued on now.
        self.current: Callable[[], Any] = backend.current_stream
        #: Queues the body's operations on a stream.
        self.on: Callable[[Any], AbstractContextManager[Any]] = backend.stream

    def copy(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        stream: Any,
        *,
        reads: "Access",
        writes: "Access",
    ) -> None:
        """Queue copies on ``stream``: of each source to the target in its place.

        ``reads`` orders accesses to the memory that is read, ``writes`` to the one that is filled.
        One event marks the end of both.
        """
        reads.written_for(stream)
        writes.freed_for(stream)
        with self.on(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        done = stream.record_event()
        reads._reads[stream] = writes._written = done
        writes._reads.clear()


class Access:
    """Orders copies into and out of one piece of memory, on whatever streams they run.

    A reader waits for the last write; a writer waits for the last write and for every read since.
    Before it is queued a reader calls ``written_for`` and a writer ``freed_for``; once it is
    queued, they call ``note_read`` and ``note_write``. Nothing is noted of what raises in between.

    Streams and events are an accelerator's; the CPU's (``torch.cpu``) order nothing, as copies
    there have ended when they return.
    """

    __slots__ = ("_reads", "_written")

    def __init__(self) -> None:
        self._written: Any = None
        #: The last read on each stream since that write.
        self._reads: dict[Any, Any] = {}

    def written_for(self, stream: Any) -> None:
        """Order ``stream`` after the last write: it may read the memory."""
        if self._written is not None:
            stream.wait_event(self._written)

    def freed_for(self, stream: Any) -> None:
        """Order ``stream`` after all reads and writes so far: it may use the memory anew."""
        if self._written is not None:
            stream.wait_event(self._written)
        for event in self._reads.values():
            if event is not None:
                stream.wait_event(event)

    def note_read(self, stream: Any) -> None:
        """Note that a read has been queued on ``stream``."""
        self._reads[stream] = stream.record_event()

    def note_write(self, stream: Any) -> None:
        """Note that a write has been queued on ``stream``."""
        self._written = stream.record_event()
        self._reads.clear()

    def events(self) -> list[Any]:
        """Events that the CPU has to wait for before it touches the memory itself."""
        events = (self._written, *self._reads.values())
        return [event for event in events if event is not None]

    @property
    def busy(self) -> bool:
        """Whether a reader was queued since the last write."""
        return any(event is not None for event in self._reads.values())


def rows_as(dtype: torch.dtype, rows: torch.Tensor) -> torch.Tensor:
    """View rows (k, s) in another dtype.

    By way of one dimension: rows of nothing have strides that no other dtype has.
    """
    if rows.dtype == dtype:
        return rows
    width = rows.shape[1] * rows.itemsize // dtype.itemsize
    return rows.view(-1).view(dtype).view(len(rows), width)


@dataclass(eq=False, slots=True)
class Slice:
    """The (n, s) part of a gathered unit that this rank exchanges with its peers on other nodes.

    On an accelerator a contiguous piece of device memory, from which the node's ranks gather the
    unit. On the CPU a view of the gather's output, where no copy can be overtaken.
    """

    #: (n, s), or (n − 1, s) where this rank's own row is left out.
    memory: torch.Tensor
    #: This rank's own row; ``None`` where it is left out.
    own_row: int | None
    #: The stream that the memory was allocated on, where it may be filled and used anew.
    home: Any
    #: Rows, elements of each and dtype, where :class:`Slices` gave the memory; else it is borrowed.
    form: tuple[int, int, torch.dtype] | None = None
    access: Access = field(default_factory=Access)
    #: Its rows, in the dtype that was asked for last.
    _rows: Sequence[torch.Tensor] = ()

    def others(self) -> list[torch.Tensor]:
        """List the other nodes' rows, as at most two contiguous runs in node order."""
        if self.own_row is None:
            return [self.memory]
        runs = (self.memory[: self.own_row], self.memory[self.own_row + 1 :])
        return [run for run in runs if run.shape[0]]

    def rows(self, node: int, shard: torch.Tensor) -> list[torch.Tensor]:
        """List one row (s) per node, this rank's own being ``shard``."""
        if not self._rows or self._rows[0].dtype != shard.dtype:
            self._rows = rows_as(shard.dtype, self.memory).unbind()
        rows = [*self._rows]
        if self.own_row is None:
            rows.insert(node, shard)
        else:
            rows[node] = shard
        return rows


class Slices:
    """Device memory for the slices of one kind of transfer, waited for before it is used anew.

    The memory is the caching allocator's and goes back to it on the stream that it came from, after
    that stream has been ordered behind all that touches it: no ``record_stream``, which would keep
    the allocator from reusing anything until the device has caught up with the host. Taking one
    more slice makes the stream wait for all but the ``retain`` latest.
    """

    def __init__(self, streams: Streams, stream: Any, retain: int) -> None:
        self._streams = streams
        self._stream = stream
        self._retain = retain
        self._released: deque[Slice] = deque()

    def take(self, rows: int, numel: int, dtype: torch.dtype, *, own_row: int | None) -> Slice:
        """Return a slice of ``rows`` × ``numel`` elements: a released one if it has that form."""
        free = self.drain(self._retain)
        form = rows, numel, dtype
        if free is not None and free.form == form:
            free.access, free.own_row = Access(), own_row
            return free
        del free  # or there would be memory for one more
        with self._streams.on(self._stream):
            memory = torch.empty((rows, numel), dtype=dtype, device=self._streams.device)
        return Slice(memory, own_row, self._stream, form=form)

    def take_for(
        self, output: torch.Tensor, topology: Topology, home: Any, *, with_own: bool
    ) -> Slice:
        """Return the slice for a gather's rows: of all nodes if ``with_own``, else of the others.

        On an accelerator it has memory of its own. With one rank per node, and on the CPU, it is a
        view of ``output`` (n·L·s), which was allocated on the stream ``home``.
        """
        nodes, node, ranks = topology.nodes, topology.node, topology.ranks_per_node
        if self._streams.on_host or ranks == 1:
            return Slice(output.view(nodes, ranks, -1)[:, topology.local_rank], node, home)
        numel = output.numel() // topology.world_size
        if with_own:
            return self.take(nodes, numel, output.dtype, own_row=node)
        # Bytes, as of what is fetched ahead: one is used anew for the other.
        return self.take(nodes - 1, numel * output.itemsize, torch.uint8, own_row=None)

    def release(self, done: Slice) -> None:
        """Keep ``done`` until what was queued on it has run; no more is going to be queued."""
        if done.form is None:
            # Borrowed, of a gather's output, whose owner frees it in the order of its own readers:
            # it is kept for a copy to the host only.
            if not done.access.busy:
                return
            self.drain(self._retain)
        self._released.append(done)

    def drain(self, retain: int = 0) -> Slice | None:
        """Free all but the ``retain`` latest slices, in stream order; return the last freed."""
        oldest = None
        while len(self._released) > retain:
            oldest = self._released.popleft()
            oldest.access.freed_for(oldest.home)
        return oldest
