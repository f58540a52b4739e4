"""Staleness of cache entries: what one rank knows of writes to its parameters."""

import contextlib
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp.cache.cache import Entry
from fcdp.checksum import quick_digest
from fcdp.guard import Guard
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(eq=False)
class Watched:
    """Writes to one unit, as far as this rank knows."""

    entry: Entry
    #: The unit's sharded parameters, looked up when one may have been replaced.
    params: Sequence[DTensor]
    #: Stamp and, where they are compared, contents when the ranks last agreed.
    stamp: int = -1
    contents: list[int] | None = None
    #: A write that no stamp shows.
    written: bool = True
    #: Something that may have written, or not: what the shards hold decides, and no stamp.
    doubted: bool = False


class Votes(NamedTuple):
    """One rank's knowledge, a flag per unit; all ranks together decide."""

    #: The unit was written.
    written: list[bool]
    #: Parameters that were older than a write were used since the last agreement.
    used: list[bool]


class Staleness:
    """Knows which units this rank has seen written, and raises generations once ranks agree.

    A hit on one rank and a miss on another would leave the one without a partner in the
    collective, so no rank decides alone: :class:`fcdp.pass_controller.PassController` collects the
    ``votes`` of all ranks before a pass, and a unit that any rank saw written is stale everywhere.
    Which rank saw which write does not matter.

    What a rank sees of writes, from the cheapest:

    - hooks: optimizer steps;
    - stamps: in-place writes that autograd counts;
    - doubts: loads, tensors that ``model.to`` and the like replace, and a ``state_dict`` that is
      alive may have written. The units' shards are compared with what was last gathered across
      nodes, by the guard's checksums, which the host waits for. Those of trained units are taken
      before the doubt if ``detect_writes`` is off;
    - contents: checksums of this rank's shards, on the CPU before each pass. On an accelerator the
      host has to wait for them, and does so before a pass without gradients;
    - the guard: checksums of the own shard at each hit, known too late to be healed.
    """

    def __init__(self, entries: Sequence[Entry], topology: Topology, guard: Guard) -> None:
        #: By unit. Read by the controller at each gather.
        self.watched = {entry.unit: Watched(entry, entry.unit.params) for entry in entries}
        #: Whether the ranks have to agree before the next gather.
        self.asked = True
        self._topology = topology
        self._guard = guard
        self._compares = guard.detects and topology.mesh.device_type == "cpu"
        #: Tensors of ``state_dict``s, which share parameters' memory.
        self._handed_out: list[weakref.ref[torch.Tensor]] = []
        #: Whether the user promises that passes find parameters as the first of them did.
        self._unchanged = False
        #: Optimizers inside of ``step``, whose closures may gather what is half updated.
        self._stepping: WeakSet[Optimizer] = WeakSet()
        #: Stamps and contents that the last votes were about.
        self._seen: list[tuple[int, list[int] | None]] = []

    def require_agreement(self) -> None:
        """Have the ranks agree on what is stale before the next gather. Call it on every rank."""
        self.asked = True

    def begin_pass(self) -> None:
        """Have ranks agree on what is stale, unless nothing is written. Call it on every rank."""
        self.asked = self.asked or not self._unchanged

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Agree before the first pass of the body, and no more: nothing is written. Every rank."""
        self.require_agreement()
        self._unchanged = True
        try:
            yield
        finally:
            self._unchanged = False
            self.require_agreement()

    def invalidate(self) -> None:
        """Declare all units written on this rank."""
        for watched in self.watched.values():
            watched.written = True
        self.require_agreement()

    def doubt(self) -> None:
        """Compare all units' shards from now on: something may write them."""
        for unit, watched in self.watched.items():
            if not watched.doubted and not watched.written and unit.stamp() == watched.stamp:
                self._guard.note(unit)
            watched.doubted = True

    def replacing(self, unit: Unit) -> None:
        """Keep in mind what stamps show now: the unit's parameters may be replaced next."""
        watched = self.watched[unit]
        watched.written |= not watched.doubted and unit.stamp() != watched.stamp

    def replaced(self, unit: Unit, moved: bool = True) -> None:
        """Doubt a unit whose parameters may be other tensors now, with stamps of their own.

        Not if nothing shows it: they have not ``moved`` in memory.
        """
        watched = self.watched[unit]
        watched.params = unit.params
        if moved or unit.stamp() != watched.stamp:
            watched.doubted, watched.stamp = True, -1

    def loaded(self) -> None:
        """Doubt all units, because a load may have written them. Call it on every rank."""
        for watched in self.watched.values():
            watched.doubted = True
        self.require_agreement()

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Doubt all units: somebody is given their memory and may write to it unseen.

        ``torch.distributed.checkpoint`` loads this way, into a ``state_dict``. For as long as any
        of ``tensors`` is alive, shards are compared whenever the ranks agree.
        """
        given = [weakref.ref(tensor) for tensor in tensors]
        if given and self._topology.nodes > 1:  # else nothing is kept
            self._handed_out += given
            self._guard.remembers_all = True
            self.doubt()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Declare written, for as long as it steps, what an optimizer updates."""
        self._stepping.add(optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """Declare written what an optimizer has updated; fused kernels leave no other trace."""
        self._stepping.discard(optimizer)
        self._stepped(optimizer)

    def look_at(self, unit: Unit) -> None:
        """Raise ``RuntimeError`` if the gather about to start would not see a write.

        Ranks cannot agree now: the write may be this one's alone. A unit in doubt may hold what it
        held; one that is stale anyway is gathered as it is now, on all ranks.
        """
        watched = self.watched[unit]
        # Contents are of the last agreement, since when a stale unit may have crossed nodes again.
        in_use = watched.entry.fresh
        if not watched.doubted or (in_use and any(self._guard.check({unit})[0])):
            raise RuntimeError(
                f"{unit.name}: parameters were written in place since the model's forward began; "
                "write between steps, or call fcdp.invalidate(model) on every rank afterwards"
            )
        watched.stamp = unit.stamp()
        if self._compares:
            watched.contents = contents(unit)

    def _stepped(self, optimizer: Optimizer) -> None:
        # Optimizers update what has a gradient, whether it still requires one or not.
        updated = {
            id(param)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.requires_grad or param.grad is not None
        }
        for unit, watched in self.watched.items():
            if any(id(param) in updated for param in unit.params):
                watched.written = True
                self.asked = True

    def votes(self, *, without_gradients: bool) -> Votes:
        """Say which units this rank has seen written. ``agree`` has to follow, on every rank.

        ``without_gradients``: whether the pass that begins computes none, so that the host may wait
        for the device.
        """
        for optimizer in self._stepping:
            self._stepped(optimizer)
        watched = [*self.watched.items()]
        for unit, each in watched:
            each.params = unit.params
        self._seen = [
            (unit.stamp(), contents(unit) if self._compares else None) for unit, _ in watched
        ]
        # A load of the same values counts as a write by its stamp: such a unit is in doubt.
        written = [
            each.written or (stamp != each.stamp and not each.doubted) or now != each.contents
            for (_, each), (stamp, now) in zip(watched, self._seen, strict=True)
        ]
        looked_at = {unit for unit, each in watched if each.doubted and not each.written}
        if self._guard.detects and without_gradients:
            looked_at = {*self.watched}
        if not looked_at or self._compares:
            return Votes(written, self._guard.poll())
        changed, used = self._guard.check(looked_at)
        return Votes([*map(operator.or_, written, changed)], used)

    def agree(self, votes: Votes) -> None:
        """Take the votes of all ranks together, each flag set if any rank has set it.

        Raises ``RuntimeError``, on every rank, if parameters that were older than a write were
        used; all units are gathered anew then.
        """
        self._handed_out = [ref for ref in self._handed_out if ref() is not None]
        self._guard.remembers_all = self._guard.detects or bool(self._handed_out)
        watched = self.watched.values()
        for each, (stamp, now), stale in zip(watched, self._seen, votes.written, strict=True):
            each.entry.generation += stale
            each.stamp, each.contents = stamp, now
            each.written, each.doubted = False, bool(self._handed_out)
        self.asked = False
        if any(votes.used):
            self._refuse(
                [unit for unit, used in zip(self.watched, votes.used, strict=True) if used]
            )

    def _refuse(self, units: Sequence[Unit]) -> None:
        """Raise on every rank: between two agreements a gather used stale parameters."""
        self._guard.forget()
        self.invalidate()
        names = ", ".join(unit.name for unit in units[:3])
        more = f" and {len(units) - 3} more units" if len(units) > 3 else ""
        raise RuntimeError(
            f"{names}{more}: parameters were written where nothing shows it (param.data, detach(), "
            "torch._foreach_*, a fused kernel) while gathered copies of the old ones were in use: "
            "results since that write are wrong. Call fcdp.invalidate(model) on every rank after "
            "such a write; all units will be gathered anew now"
        )


def contents(unit: Unit) -> list[int]:
    """List a checksum of each tensor that holds this rank's shards, of none without memory."""
    return [quick_digest(shard) for shard in unit.held if shard.device.type != "meta"]
