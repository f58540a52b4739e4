"""Staleness of cache entries, decided alike on every rank."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from fcdp.cache.entry import Entry
from fcdp.checksum import checksum, sum_of_words
from fcdp.exchange import any_rank, on_every_rank
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit

#: Hits of one unit in a pass, after which it is compared earlier than at the next.
HITS = 8


@dataclass(eq=False)
class _Watched:
    """Writes to one unit, as far as this rank knows."""

    entry: Entry
    #: Stamp and, where they are compared, contents when the ranks last agreed.
    stamp: int = -1
    contents: list[int] | None = None
    #: A write that no stamp shows.
    written: bool = True


@dataclass(eq=False)
class Staleness:
    """Raises the generation of entries whose parameters have been written, on all ranks at once.

    A hit on one rank and a miss on another would leave the one without a partner in the
    collective, so no rank decides alone. A *pass* begins with a forward of the model, or with a
    gather outside of one (a sub-module's forward, a registered forward method, ``unshard()``).
    Before its first gather, and after an optimizer step or a load within it, ranks exchange two
    bytes per unit, or three and two of their own where differences are told; a unit that any rank
    saw written is stale everywhere. Which rank saw which write does not matter.

    What a rank sees of writes, from the cheapest:

    - hooks: optimizer steps, loads, and parameters whose tensors are replaced (``model.to``);
    - stamps: in-place writes that autograd counts;
    - contents: checksums of this rank's shards, on the CPU before each pass. On an accelerator the
      host has to wait for them, and does so before a pass without gradients;
    - the guard: checksums of the own shard at each hit, known too late to be healed.
    """

    entries: Sequence[Entry]
    topology: Topology
    guard: Guard | None
    #: Whether a unit's gather is the first of a pass that nobody told.
    begins_pass: Callable[[Unit], bool]
    #: Whether the pass that has begun computes no gradients.
    without_gradients: Callable[[], bool]
    verify: bool = False
    #: Whether this rank cannot take part in telling a unit's difference.
    lacks_base: Callable[[Unit], bool] | None = None
    wishes: Callable[[], list[bool]] | None = None
    #: Called on all ranks when they have agreed, before the first gather, with whether any of them
    #: had each of the ``wishes``.
    agreed: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        self._watched = {entry.unit: _Watched(entry) for entry in self.entries}
        self._compares = self.guard is not None and self.topology.mesh.device_type == "cpu"
        #: Tensors of ``state_dict``s, which share parameters' memory.
        self._handed_out: list[weakref.ref[torch.Tensor]] = []
        self._asked = True
        #: Whether somebody promises that passes find parameters as the first of them did.
        self._unchanged = False
        #: Optimizers inside of ``step``, whose closures may gather what is half updated.
        self._stepping: WeakSet[Optimizer] = WeakSet()

    def ask(self) -> None:
        """Have the ranks agree again at the next gather. Every rank must call it."""
        self._asked = True

    def begin(self) -> None:
        """A pass begins: have the ranks agree again, unless nothing is written. Every rank."""
        self._asked = self._asked or not self._unchanged

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Agree before the first pass of the body, and no more: nothing is written. Every rank."""
        self.ask()
        self._unchanged = True
        try:
            yield
        finally:
            self._unchanged = False
            self.ask()

    def invalidate(self) -> None:
        """Declare all units written on this rank."""
        for watched in self._watched.values():
            watched.written = True
        self.ask()

    def replaced(self, unit: Unit) -> None:
        """Declare a unit written on this rank: its parameters are other tensors now."""
        self._watched[unit].written = True

    def hand_out(self, given: Iterable[torch.Tensor]) -> None:
        """Note what units hold: somebody is given their memory and may write to it unseen.

        ``torch.distributed.checkpoint`` loads so, into a ``state_dict``. Contents are compared
        whenever the ranks agree for as long as any of ``given`` is alive: one pass over this rank's
        shards, which the host waits for.
        """
        if not self._compares:
            self._handed_out += [weakref.ref(tensor) for tensor in given]
            for unit, watched in self._watched.items():
                watched.contents = watched.contents or contents(unit)

    def conclude(self) -> None:
        """Have the ranks agree now, on all that the guard has found so far. Collective.

        For the end of a run: what it finds is otherwise known one or two passes later. Raises
        ``RuntimeError`` on all ranks if stale parameters were used.
        """
        if self.guard is not None and self.topology.nodes > 1:
            self.guard.land()
            self._agree()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Declare written, for as long as it steps, what an optimizer updates."""
        self._stepping.add(optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """Declare written what an optimizer has updated; fused kernels leave no other trace."""
        self._stepping.discard(optimizer)
        self._stepped(optimizer)

    def settle(self, unit: Unit) -> None:
        """Agree if asked to; then the entry's generation holds for the gather about to start.

        Raises ``RuntimeError`` if this rank's parameters changed after the ranks had agreed, and,
        on all ranks, if stale parameters were used since.
        """
        begins = self.begins_pass(unit)
        if self.topology.nodes == 1 and not self.verify:
            return  # nothing is kept
        if begins:
            self.begin()
        if self._asked:
            self._agree()
        elif unit.stamp() != self._watched[unit].stamp:
            raise RuntimeError(
                f"{unit.name}: parameters were written in place since the model's forward began; "
                "write between steps, or call fcdp.invalidate(model) on every rank afterwards"
            )

    def _stepped(self, optimizer: Optimizer) -> None:
        # Optimizers update what has a gradient, whether it still requires one or not.
        updated = {
            id(param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad or param.grad is not None
        }
        for unit, watched in self._watched.items():
            if any(id(param) in updated for param in unit.params):
                watched.written = True
                self._asked = True

    def _agree(self) -> None:
        for optimizer in self._stepping:
            self._stepped(optimizer)
        watched = [*self._watched.items()]
        stamps = [unit.stamp() for unit, _ in watched]
        held = [
            contents(unit) if self._compares or each.contents is not None else None
            for unit, each in watched
        ]
        written = [
            each.written or stamp != each.stamp or now != each.contents
            for (_, each), stamp, now in zip(watched, stamps, held, strict=True)
        ]
        differ = [False] * len(written)
        if self.guard is not None and not self._compares and self.without_gradients():
            other, differ = self.guard.check()
            written = [*map(operator.or_, written, other)]
        elif self.guard is not None:
            differ = self.guard.found()
        lacks = [] if self.lacks_base is None else [self.lacks_base(unit) for unit, _ in watched]
        wishes = [] if self.wishes is None else self.wishes()
        flags = any_rank([*wishes, *written, *differ, *lacks], self.topology)
        wished, flags = flags[: len(wishes)], flags[len(wishes) :]
        count = len(watched)
        written, differ, lacks = flags[:count], flags[count : 2 * count], flags[2 * count :]
        for (_, each), lacking in zip(watched, lacks, strict=False):
            each.entry.based = not lacking
        self._handed_out = [given for given in self._handed_out if given() is not None]
        compares = self._compares or bool(self._handed_out)
        for (_, each), stamp, now, stale in zip(watched, stamps, held, written, strict=True):
            each.entry.generation += stale
            each.stamp, each.written = stamp, False
            each.contents = now if compares else None
        self._asked = False
        if any(differ):
            self._refuse([unit for (unit, _), wrong in zip(watched, differ, strict=True) if wrong])
        if self.verify:
            self._compare_generations()
        if self.agreed is not None:
            self.agreed(*wished)

    def _refuse(self, units: Sequence[Unit]) -> None:
        """Raise on every rank: between two agreements a gather used stale parameters."""
        assert self.guard is not None
        self.guard.forget()
        self.invalidate()
        names = ", ".join(unit.name for unit in units[:3])
        more = f" and {len(units) - 3} more units" if len(units) > 3 else ""
        raise RuntimeError(
            f"{names}{more}: parameters were written where nothing shows it (param.data, detach(), "
            "torch._foreach_*, a fused kernel) while gathered copies of the old ones were in use: "
            "results since that write are wrong. Call fcdp.invalidate(model) on every rank after "
            "such a write; all units will be gathered anew now"
        )

    def _compare_generations(self) -> None:
        """Raise ``RuntimeError`` on every rank if generations differ between ranks."""
        units = [*self._watched]
        mine = [self._watched[unit].entry.generation for unit in units]
        ranks = on_every_rank(torch.tensor(mine, device="cpu"), self.topology).tolist()
        for rank, theirs in enumerate(ranks):
            for unit, generation, first in zip(units, theirs, ranks[0], strict=True):
                if generation != first:
                    raise RuntimeError(
                        f"{unit.name}: rank {rank} is at generation {generation}, rank 0 at {first}"
                    )


def contents(unit: Unit) -> list[int]:
    """List a checksum of each of this rank's shards; of none that has no memory yet (``meta``)."""
    shards = [param._local_tensor.detach() for param in unit.params]
    sums = [checksum(shard) for shard in shards if shard.device.type != "meta"]
    return torch.stack(sums).tolist() if sums else []


@dataclass(eq=False)
class _Row:
    """One unit's sums and flag, views of all units' on the device."""

    #: Sums of the shard as gathered across nodes, then at the hits since: (1 + HITS, int64).
    sums: torch.Tensor
    hits: list[torch.Tensor]
    differs: torch.Tensor
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
    all ranks. Writes before a pass that runs on the CPU, or without gradients, are seen in time.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, streams: Streams) -> None:
        self._streams = streams
        self._sum = checksum if streams.on_host else sum_of_words
        #: Sums of each own shard, as last gathered across nodes and at the hits since.
        self._sums = torch.zeros(len(units), 1 + HITS, dtype=torch.int64, device=device)
        self._differ = torch.zeros(len(units), dtype=torch.bool, device=device)
        self._of = {
            unit: _Row(row, [*row[1:].unbind()], differs)
            for unit, row, differs in zip(
                units, self._sums.unbind(), self._differ.unbind(), strict=True
            )
        }
        # Page-locked where there is an accelerator, or the copy would block the host.
        self._landing = torch.zeros(
            len(units), dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda"
        )
        #: Flags as they were asked for; kept until they have landed.
        self._asked = self._differ
        self._landed: Any = None
        #: Whether a pass has found the copy under way already.
        self._late = False

    def remember(self, unit: Unit, shard: torch.Tensor) -> None:
        """Note what the own shard holds, in the order of the current stream."""
        row = self._of[unit]
        self._look_at(row)
        row.sums.copy_(self._sum(shard))

    def compare(self, unit: Unit, shard: torch.Tensor) -> None:
        """Note what it holds now, in the order of the current stream; it is compared once per pass.

        A comparison at each hit would be two operations more for each.
        """
        row = self._of[unit]
        if row.used == HITS:
            self._look_at(row)
        place, row.used = row.hits[row.used], row.used + 1
        self._sum(shard, place)

    def _look_at(self, row: _Row) -> None:
        """Compare a unit's sums before they are overwritten."""
        if row.used:
            row.differs.logical_or_((row.sums[1:] != row.sums[0]).any())
            row.used = 0

    def _look_at_all(self) -> None:
        """Compare all sums; those of hits that have not been yet are as gathered, or seen before.

        The next gather across nodes, which overwrites them, waits until they have been read.
        """
        self._differ.logical_or_((self._sums[:, 1:] != self._sums[:, :1]).any(1))
        self._streams.inter_node.wait_stream(self._streams.current())
        for row in self._of.values():
            row.used = 0

    def found(self) -> list[bool]:
        """List per unit whether a mismatch has become known, and ask for the next copy.

        Called once per pass, before its first gather, on the stream of the gathers.
        """
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

    def check(self) -> tuple[list[bool], list[bool]]:
        """List per unit whether the own shard is other than gathered, and as ``found`` does.

        All of it is known when this returns: the host waits for the device, once.
        """
        sums = [checksum(unit.shard(self._sums.device)) for unit in self._of]
        self._look_at_all()
        written = torch.stack(sums) != self._sums[:, 0]
        known = torch.stack([written, self._differ]).tolist()
        return known[0], known[1]

    def land(self) -> None:
        """Wait until all that was compared so far is known."""
        if not self._streams.on_host:
            self._ask()
            self._landed.synchronize()

    def _ask(self) -> None:
        self._look_at_all()
        # A copy of them: what is compared next does not wait for the copies to the host before.
        self._asked = self._differ.clone()
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
