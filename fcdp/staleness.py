"""Staleness of cache entries, decided alike on every rank."""

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from fcdp.cache.entry import Entry
from fcdp.checksum import checksum
from fcdp.exchange import any_rank, on_every_rank
from fcdp.guard import Guard
from fcdp.topology import Topology
from fcdp.unit import Unit


@dataclass(eq=False)
class _Watched:
    """Writes to one unit, as far as this rank knows."""

    entry: Entry
    #: Stamp and, where they are compared, contents when the ranks last agreed.
    stamp: int = -1
    contents: list[int] | None = None
    #: A write that no stamp shows.
    written: bool = True
    #: Something that may have written, or not: what the shards hold decides, and no stamp.
    doubted: bool = False


class Staleness:
    """Raises the generation of entries whose parameters have been written, on all ranks at once.

    A hit on one rank and a miss on another would leave the one without a partner in the
    collective, so no rank decides alone. A *pass* begins with a forward of the model, or with a
    gather outside of one (a sub-module's forward, a registered forward method, ``unshard()``).
    Before its first gather, and after an optimizer step or a load within it, ranks exchange two
    bytes per unit, or three and two of their own where differences are sent; a unit that any rank
    saw written is stale everywhere. Which rank saw which write does not matter.

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

    def __init__(
        self,
        entries: Sequence[Entry],
        topology: Topology,
        guard: Guard,
        begins_pass: Callable[[Unit], bool],
        without_gradients: Callable[[], bool],
        *,
        verify: bool = False,
        lacks_base: Callable[[Unit], bool] | None = None,
        wishes: Callable[[], list[bool]] | None = None,
        agreed: Callable[..., None] | None = None,
    ) -> None:
        """``begins_pass`` says whether a unit's gather is the first of a pass outside a forward.

        ``without_gradients`` says whether the pass that has begun computes none.
        ``lacks_base`` says whether this rank cannot take part in exchanging a unit's differences.
        ``agreed`` is called on all ranks when they have agreed, before the first gather, with
        whether any of them had each of the ``wishes``.
        """
        self._watched = {entry.unit: _Watched(entry) for entry in entries}
        self._topology = topology
        self._guard = guard
        self._begins_pass = begins_pass
        self._without_gradients = without_gradients
        self._verify = verify
        self._lacks_base = lacks_base
        self._wishes = wishes
        self._agreed = agreed
        self._compares = guard.detects and topology.mesh.device_type == "cpu"
        #: Tensors of ``state_dict``s, which share parameters' memory.
        self._handed_out: list[weakref.ref[torch.Tensor]] = []
        self._asked = True
        #: Whether the user promises that passes find parameters as the first of them did.
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

    def doubt(self, *units: Unit) -> None:
        """Have these units' shards compared, or all units': from now on something may write."""
        for unit in units or self._watched:
            watched = self._watched[unit]
            if not watched.doubted and not watched.written and unit.stamp() == watched.stamp:
                self._guard.note(unit)
            watched.doubted = True

    def replacing(self, unit: Unit) -> None:
        """Keep in mind what stamps show now: the unit's parameters may be replaced next."""
        watched = self._watched[unit]
        watched.written |= not watched.doubted and unit.stamp() != watched.stamp

    def replaced(self, unit: Unit, moved: bool = True) -> None:
        """Doubt a unit whose parameters may be other tensors now, with stamps of their own.

        Not if nothing shows it: they have not ``moved`` in memory.
        """
        watched = self._watched[unit]
        if moved or unit.stamp() != watched.stamp:
            watched.doubted, watched.stamp = True, -1

    def loaded(self) -> None:
        """Doubt all units: a load may have written, by whatever means. Every rank must call it."""
        for watched in self._watched.values():
            watched.doubted = True
        self.ask()

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

    def conclude(self) -> None:
        """Have the ranks agree now, on all that the guard has found so far. Collective.

        For the end of a run: what it finds is otherwise known one or two passes later. Raises
        ``RuntimeError`` on all ranks if stale parameters were used.
        """
        if self._guard.detects and self._topology.nodes > 1:
            self._guard.land()
            self._agree()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Declare written, for as long as it steps, what an optimizer updates."""
        self._stepping.add(optimizer)

    def end_step(self, optimizer: Optimizer) -> None:
        """Declare written what an optimizer has updated; fused kernels leave no other trace."""
        self._stepping.discard(optimizer)
        self._stepped(optimizer)

    def settle(self, unit: Unit) -> None:
        """Agree if due; the entry's generation then holds for the gather about to start.

        Raises ``RuntimeError`` if this rank's parameters changed after the ranks had agreed, and,
        on all ranks, if stale parameters were used since.
        """
        begins = self._begins_pass(unit)
        if self._topology.nodes == 1 and not self._verify:
            return  # nothing is kept
        if begins:
            self.begin()
        if self._asked:
            self._agree()
        elif unit.stamp() != self._watched[unit].stamp:
            self._look_at(unit, self._watched[unit])

    def _look_at(self, unit: Unit, watched: _Watched) -> None:
        """Raise ``RuntimeError`` if the gather about to start would not see a write.

        Ranks cannot agree now: the write may be this one's alone. A unit in doubt may hold what it
        held; one that is stale anyway is gathered as it is now, on all ranks.
        """
        changed = not watched.doubted
        if watched.doubted and watched.entry.fresh and self._compares:
            changed = contents(unit) != watched.contents
        elif watched.doubted and watched.entry.fresh:
            changed = any(self._guard.check({unit})[0])
        if changed:
            raise RuntimeError(
                f"{unit.name}: parameters were written in place since the model's forward began; "
                "write between steps, or call fcdp.invalidate(model) on every rank afterwards"
            )
        watched.stamp = unit.stamp()

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
        held = [contents(unit) if self._compares else None for unit, _ in watched]
        # A load of the same values counts as a write by its stamp: such a unit is in doubt.
        written = [
            each.written or (stamp != each.stamp and not each.doubted) or now != each.contents
            for (_, each), stamp, now in zip(watched, stamps, held, strict=True)
        ]
        looked_at = {unit for unit, each in watched if each.doubted and not each.written}
        if self._guard.detects and self._without_gradients():
            looked_at = {*self._watched}
        if looked_at and not self._compares:
            changed, differ = self._guard.check(looked_at)
            written = [*map(operator.or_, written, changed)]
        else:
            differ = self._guard.poll()
        lacks = [] if self._lacks_base is None else [self._lacks_base(unit) for unit, _ in watched]
        wishes = [] if self._wishes is None else self._wishes()
        flags = any_rank([*wishes, *written, *differ, *lacks], self._topology)
        wished, flags = flags[: len(wishes)], flags[len(wishes) :]
        count = len(watched)
        written, differ, lacks = flags[:count], flags[count : 2 * count], flags[2 * count :]
        for (_, each), lacking in zip(watched, lacks, strict=False):
            each.entry.based = not lacking
        self._handed_out = [ref for ref in self._handed_out if ref() is not None]
        self._guard.remembers_all = self._guard.detects or bool(self._handed_out)
        for (_, each), stamp, now, stale in zip(watched, stamps, held, written, strict=True):
            each.entry.generation += stale
            each.stamp, each.contents = stamp, now
            each.written, each.doubted = False, bool(self._handed_out)
        self._asked = False
        if any(differ):
            self._refuse([unit for (unit, _), wrong in zip(watched, differ, strict=True) if wrong])
        if self._verify:
            self._compare_generations()
        if self._agreed is not None:
            self._agreed(*wished)

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

    def _compare_generations(self) -> None:
        """Raise ``RuntimeError`` on every rank if generations differ between ranks."""
        units = [*self._watched]
        mine = [self._watched[unit].entry.generation for unit in units]
        ranks = on_every_rank(torch.tensor(mine, device="cpu"), self._topology).tolist()
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
