"""The passes over one model: where they begin and end, and what each of their gathers is.

Every decision about a gather is taken here, by ``PassController.before_gather``, and alike on every
rank. Transports (:mod:`fcdp.all_gather`) carry it out. Nothing below calls back.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fcdp import fsdp2
from fcdp.agreement import PartsInStep
from fcdp.cache.cache import Cache, Entry
from fcdp.counts import Phase, in_backward, writes
from fcdp.exchange import any_rank, on_every_rank
from fcdp.guard import Guard
from fcdp.hooks import Extension, GatherExtension
from fcdp.in_flight import InFlight
from fcdp.staleness import Staleness, Votes
from fcdp.topology import Topology
from fcdp.unit import Unit

logger = logging.getLogger("fcdp")

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(hook: _Function) -> _Function:
    """Keep ``torch.compile`` from tracing a hook, whose decisions are no part of a graph."""
    return cast(_Function, torch.compiler.disable(hook))


@dataclass(slots=True)
class Decision:
    """The decision on one gather; alike on every rank but for ``coming``."""

    #: Whether it is served from every rank's cache; else it crosses nodes.
    hit: bool = False
    #: Whether what crosses nodes is the difference from what the caches hold.
    difference: bool = False
    #: Whether the cache takes what was received.
    keep: bool = False
    #: Entries that are expected to be gathered next, the first of them first.
    coming: Sequence[Entry] = ()


#: On one node nothing is kept.
_ALONE = Decision()


class GatherOrder:
    """The order in which a pass gathers its units, foreseen from the pass before.

    A pass starts with a forward of the model and holds what follows it: forward from the first unit
    to the last, backward from the last to the first, recomputations wherever checkpointing puts
    them.

    Passes with gradients and without are kept apart, so that an evaluation between two steps does
    not make the first step after it unknown.
    """

    def __init__(self) -> None:
        self._with_gradients = False
        self._before: dict[bool, list[Entry]] = {False: [], True: []}
        self._now: list[Entry] = []

    def begin(self, with_gradients: bool) -> None:
        """Begin a pass; gathers noted since the last call, if any, were the pass before."""
        if self._now:
            self._before[self._with_gradients], self._now = self._now, []
        self._with_gradients = with_gradients

    def note(self, entry: Entry, depth: int) -> Sequence[Entry]:
        """Note the gather of a unit; return the entries of up to ``depth`` that come next.

        Nothing, if the pass before had another unit in this place: the model took another path.
        """
        place, before = len(self._now), self._before[self._with_gradients]
        self._now.append(entry)
        if place >= len(before) or before[place] is not entry:
            return []
        return before[place + 1 : place + 1 + depth]


class PassController:
    """Follows the passes over a model, and decides on each gather for all ranks together.

    A *pass* begins with a forward of the model, and goes on through its backward. So does the
    outermost FSDP2 module's forward or registered forward method that is called by itself, and
    every ``unshard()`` outside of a forward. Before its first gather, and after an optimizer step
    or a load within it, the ranks agree: they exchange two bytes per unit (three where
    differences are sent) and some forty more.

    What a pass keeps gathered is also followed here: a later pass would use it as it is, whatever
    an optimizer has written since.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Sequence[Entry],
        topology: Topology,
        *,
        cache: Cache,
        staleness: Staleness,
        guard: Guard,
        in_flight: InFlight,
        gathers: GatherExtension | None,
        reductions: Extension | None,
        look_ahead: int,
        verify: bool,
        not_resharded: Sequence[Unit],
    ) -> None:
        """``gathers`` and ``reductions`` are extensions by codecs, where there are any.

        ``not_resharded`` are units that FCDP keeps gathered after forward, where FSDP2 would
        reshard them: for as long as the user does not say otherwise.
        """
        self.not_resharded = not_resharded
        #: Whether gradients cross nodes after this micro-batch: set by ``fcdp.accumulate``.
        self.requires_sync = True
        self._model = model
        self._entries = entries
        self._units = [entry.unit for entry in entries]
        self._topology = topology
        self._nodes = topology.nodes
        parts = [unit for unit in self._units if unit.topology is not topology]
        self._in_step = PartsInStep([(unit.name, unit.topology) for unit in parts], topology)
        self._failures = topology.failures
        self._cache = cache
        self._staleness = staleness
        self._guard = guard
        self._in_flight = in_flight
        self._gathers = gathers
        self._extensions = [each for each in (gathers, reductions) if each is not None]
        self._look_ahead = look_ahead
        self._verify = verify
        self._order = GatherOrder()
        #: Passes so far, and in which of them gradients first crossed nodes since the last step.
        self._number, self._crossed_in = 0, 0
        #: Whether rank 0 is to say that gradients cross nodes more than once per step.
        self._hints = topology.rank == 0
        self._in_forward = False
        #: Whether the pass under way computes no gradients.
        self._without_gradients = False
        #: Whether an optimizer step may follow the pass before another forward does.
        self._trains = True
        #: FSDP2's state of the module whose own pass is under way, and units gathered in it.
        self._outermost: Any = None
        self._gathered: list[Unit] = []
        #: Whether gradients were computed when FSDP2 was asked for the last gather.
        self._grad_enabled = True
        #: Units that the user has gathered by ``unshard()``, until he or a forward reshards them.
        self._by_hand: set[Unit] = set()
        for unit in not_resharded:
            fsdp2.leave_open(unit.module)
        self._follow()

    def begin_pass(self) -> None:
        """Begin the pass of a forward of the model."""
        self._in_forward, self._outermost = True, None
        self._without_gradients = not torch.is_grad_enabled()
        self._count_pass()
        self._drop_prefetched(self._units)
        self.let_go()  # of a forward that raised or had no backward
        self._staleness.begin_pass()
        self._begin_order(trains=torch.is_grad_enabled())

    def before_gather(self, entry: Entry, phase: Phase, *, resized: bool) -> Decision:
        """Decide what the gather of a unit is, together with the other ranks where that is due.

        ``resized``: whether its shard has other bytes than it was planned with; alike on every
        rank. Raises ``RuntimeError`` if this rank's parameters changed after the ranks had agreed,
        and, on all ranks, if stale parameters were used since.
        """
        unit, cache, staleness = entry.unit, self._cache, self._staleness
        if resized:
            cache.drop_resized(entry)
        if not (self._in_forward or phase == "backward"):
            self._begin_own_pass(unit)
        lost = None
        watched = staleness.watched[unit]
        if self._nodes == 1 and not self._verify:
            return _ALONE
        if staleness.asked:
            lost = self._agree(entry)
        elif (unit.stamp() if unit.packed else writes(watched.params)) != watched.stamp:
            staleness.look_at(unit)
        coming = self._order.note(entry, self._look_ahead)
        wants = self._gathers is not None and self._gathers.wants(unit)
        fresh = entry.placed and entry.fresh
        held = False
        if fresh or (wants and entry.based):
            held = self._all_hold(entry) if lost is None else not lost
            if fresh and entry.fallible and not entry.settled:
                entry.settled = held and cache.stays(unit)
        if fresh and held:
            return Decision(hit=True, coming=coming)
        keep = not resized and (wants or self._worth_keeping(entry))
        return Decision(difference=held, keep=keep, coming=coming)

    def end_pass(self) -> None:
        """End a forward of the model, which may have raised. Its backward belongs to the pass."""
        self._in_forward = False
        self._failures.forward_ends()
        if not _raising():  # else FSDP2 is in the middle of something
            self._drop_prefetched(self._units)
        self._end_forward()

    def conclude(self) -> None:
        """Exchange all that the guard has found so far, now. Collective.

        For the end of a run: what it finds is otherwise known one or two passes later. Raises
        ``RuntimeError`` on all ranks if stale parameters were used.
        """
        if self._guard.detects and self._nodes > 1:
            self._guard.land()
            self._agree(None)

    def before_step(self) -> None:
        """An optimizer is about to step: reshard, wait, and begin to count crossings anew."""
        self._crossed_in = 0
        self.let_go()
        self._in_flight.finish()  # of a backward that raised

    def note_crossing(self, unit: Unit) -> None:
        """Say once that a step's gradients cross nodes again, which ``accumulate`` saves."""
        again = self._crossed_in not in (0, self._number)
        if self._hints and again and any(map(_has_gradient, unit.params)):
            self._hints = False
            logger.warning(
                "gradients cross nodes a second time since the last optimizer step; if these are "
                "micro-batches of one step, run each under fcdp.accumulate(model, last=...), and "
                "they cross once"
            )
        self._crossed_in = self._crossed_in or self._number

    def accumulates(self) -> None:
        """The user knows ``accumulate``: no hint is needed."""
        self._hints = False

    def let_go(self) -> None:
        """Reshard what FCDP keeps gathered; a backward that still needs it gathers it again.

        A later pass would use it as it is now, whatever an optimizer has written since. What the
        user keeps gathered, by ``set_reshard_after_forward`` or ``unshard()``, stays so, as in
        FSDP2: a forward that needs no gather there needs none here.
        """
        for unit in self.not_resharded:
            ours = fsdp2.keeps_root(fsdp2.state(unit.module))
            if ours and unit not in self._by_hand:
                unit.module.reshard()

    def _agree(self, entry: Entry | None) -> bool | None:
        """Exchange all that ranks decide together, once; ``entry`` is about to be gathered.

        Returns whether any rank lacks its version last offered; ``None`` where not all ranks ask
        for it: some of them alone share it, or gather it first.
        """
        staleness, units = self._staleness, self._units
        mine = staleness.votes(without_gradients=self._without_gradients)
        lacks = [] if self._gathers is None else [*map(self._gathers.lacks_base, units)]
        wishes = [extension.votes() for extension in self._extensions]
        alone, lost = True, False
        if entry is not None and self._all_may_lack(entry):
            # A disk is not asked for what will cross nodes as a whole anyway.
            useful = not mine.written[units.index(entry.unit)] or self._gathers is not None
            alone, lost = False, not (useful and self._cache.has_offered(entry))
        # As many flags on every rank, whichever unit it gathers first.
        question = [alone, lost] * any(each.fallible for each in self._entries)
        places = self._in_step.flags()
        parts = [mine.written, mine.used, lacks, question, places, *wishes]
        flags = iter(any_rank([flag for part in parts for flag in part], self._topology))
        written, used, lacks, question, places, *wishes = (
            [next(flags) for _ in part] for part in parts
        )
        self._in_step.check(places)
        for each, lacking in zip(self._entries, lacks, strict=False):
            each.based = not lacking
        staleness.agree(Votes(written, used))
        if self._verify:
            self._compare_generations()
        for extension, votes in zip(self._extensions, wishes, strict=True):
            extension.agreed(votes)
        return None if alone or question[0] else question[1]

    def _all_may_lack(self, entry: Entry) -> bool:
        """Whether any rank of the topology, all of which share the unit, may lack the entry."""
        return entry.fallible and not entry.settled and entry.unit.topology is self._topology

    def _all_hold(self, entry: Entry) -> bool:
        """Whether all ranks that share the unit can load what was last offered.

        They are asked if one may not.
        """
        held = self._cache.has_offered(entry)
        if entry.settled or not entry.fallible:
            return held
        return not any_rank([not held], entry.unit.topology)[0]

    def _worth_keeping(self, entry: Entry) -> bool:
        """Whether a gather will read the entry before the next write; alike on every rank.

        What stays gathered through a step is read again by the next forward only if no optimizer
        step comes first: without gradients, or before the last of several micro-batches. Where this
        guess was wrong once, the entry is kept from then on.
        """
        missed = entry.missed or entry.passed_over == entry.generation
        trains = self.requires_sync and self._trains
        return entry.unit.reuses > 0 or missed or not trains

    def _compare_generations(self) -> None:
        """Raise ``RuntimeError`` on every rank if generations differ between ranks."""
        mine = [entry.generation for entry in self._entries]
        ranks = on_every_rank(torch.tensor(mine, device="cpu"), self._topology).tolist()
        for rank, theirs in enumerate(ranks):
            for unit, generation, first in zip(self._units, theirs, ranks[0], strict=True):
                if generation != first:
                    raise RuntimeError(
                        f"{unit.name}: rank {rank} is at generation {generation}, rank 0 at {first}"
                    )

    def _begin_own_pass(self, unit: Unit) -> None:
        """Begin a pass that is not the whole model's, unless one is under way."""
        outermost = fsdp2.outermost(unit.module)
        begins = outermost is None or outermost is not self._outermost
        if begins:
            self._without_gradients = not self._grad_enabled
        if outermost is not None:
            if begins:
                self._outermost = outermost
                fsdp2.when_forward_ends(outermost, self._end_own_pass)
            self._gathered.append(unit)
        if begins:
            self._count_pass()
            if self.requires_sync:
                # Others of its kind may follow before the step: all that it gathers is kept.
                self._begin_order(trains=False)
            self._staleness.begin_pass()

    def _end_own_pass(self) -> None:
        """Forget the outermost module, whose forward or forward method has ended."""
        self._outermost = None
        gathered, self._gathered = self._gathered, []
        self._drop_prefetched(gathered)
        self._end_forward()

    def _end_forward(self) -> None:
        """A forward has ended; without gradients no backward will come."""
        if not (torch.is_grad_enabled() or _raising()):
            self.let_go()

    def _count_pass(self) -> None:
        self._number += 1
        # A backward that raised has left reductions in flight: they belong to the pass before.
        self._in_flight.finish()
        if self._failures.begins():
            # The ranks left the pass before within one gather, not all at the same place in it:
            # some may have offered what it brought to their caches, and others not.
            self._staleness.invalidate()

    def _begin_order(self, *, trains: bool) -> None:
        self._trains = trains
        self._order.begin(trains)
        self._cache.begin_pass()

    def _follow(self) -> None:
        """Call the transitions at the model's forwards. Recomputations in backward are none."""

        @untraced
        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():  # a recomputation belongs to the forward that it repeats
                self.begin_pass()

        @untraced
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self.end_pass()

        self._model.register_forward_pre_hook(before, prepend=True)
        self._model.register_forward_hook(after, always_call=True)
        for unit in self._units:
            fsdp2.around_gathers(
                unit.group,
                before=self._asked_to_gather,
                asked_for=functools.partial(self._note_by_hand, unit),
                resharded=functools.partial(self._by_hand.discard, unit),
            )

    def _asked_to_gather(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()

    def _note_by_hand(self, unit: Unit) -> None:
        if fsdp2.by_hand(unit.group):
            self._by_hand.add(unit)

    def _drop_prefetched(self, units: Iterable[Unit]) -> None:
        """Forget what a pass prefetched and then skipped: by the next it may be stale."""
        asked_for = {*self._by_hand}
        for unit in units:
            if unit not in asked_for and fsdp2.prefetched(unit.group) is not None:
                unit.module.unshard()
                unit.module.reshard()
        self._by_hand &= asked_for  # not what these have gathered with a unit


def _raising() -> bool:
    """Whether an exception is being handled."""
    return any(sys.exc_info())


def _has_gradient(param: DTensor) -> bool:
    """Whether a gradient waits for a step that nobody has zeroed; the host waits to see it."""
    return param.grad is not None and bool(param.grad._local_tensor.any())  # type: ignore[attr-defined]
