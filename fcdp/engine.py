"""Engine of one FSDP2 model: FCDP's units, cache, hooks and ledger, with one lifetime."""

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp import fsdp2
from fcdp.agreement import on_all_ranks
from fcdp.all_gather import CachedAllGather
from fcdp.arguments import Setup, warn_of_sizes
from fcdp.cache.cache import Cache
from fcdp.cache.entry import Entry, Slices
from fcdp.cache.memory_plan import MemoryPlan
from fcdp.codec import Codecs, Exact
from fcdp.counts import Ledger
from fcdp.delta.economy import Economy
from fcdp.delta.on_device import Sizes
from fcdp.delta.sent import Base, Sent
from fcdp.encoded_reduce import EncodedReduce, ExactReduce, check_encodable, check_exact
from fcdp.guard import Guard
from fcdp.in_flight import InFlight
from fcdp.optimizers import Strays, follow_optimizers
from fcdp.partial_gradients import Partials
from fcdp.passes import Passes
from fcdp.reduce_scatter import HierarchicalReduceScatter
from fcdp.staleness import Staleness
from fcdp.streams import Streams
from fcdp.topology import Topology
from fcdp.unit import Unit, find_units

logger = logging.getLogger("fcdp")

_ATTRIBUTE = "_fcdp_engine"


class Engine:
    """Installs the custom collectives on every unit and follows what makes entries stale."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        setup: Setup,
        *,
        not_resharded: Sequence[nn.Module] = (),
        before: Iterable[weakref.ref[nn.Parameter]] = (),
    ) -> None:
        """``not_resharded`` are modules that stay gathered after forward because FCDP chose so.

        ``before`` are the parameters that the model had before it was sharded.
        """
        self.topology = topology
        self.setup = setup
        policy, codecs = setup.policy, setup.codecs
        self.units = find_units(model, topology)
        for unit in self.units:
            _check_collectives(unit)
        if codecs.gather is not None:
            check_encodable(self.units, codecs.gather)
        if isinstance(exact := codecs.reduce, Exact):
            check_exact(topology)
        device = torch.device(topology.mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        flat = setup.exchanges == "flat" and topology.nodes > 1
        #: The ranks of flat exchanges, by FSDP2's own group of them.
        self._world = topology.mesh.get_group() if flat else None
        self.ledger = Ledger()
        self.entries = {unit: Entry(unit) for unit in self.units}
        streams = Streams(device)
        detects = setup.safety.detect_writes and topology.nodes > 1
        guard = Guard(self.units, device, streams, detects=detects)
        self._strays = Strays(model, before, warns=topology.rank == 0)
        #: Passes so far, and in which of them gradients first crossed nodes since the last step.
        self._number, self._crossed_in = 0, 0
        #: Whether rank 0 is to say that gradients cross nodes more than once per step.
        self._hints = topology.rank == 0
        ids = {*map(id, not_resharded)}
        self._passes = Passes(model, [unit for unit in self.units if id(unit.module) in ids])
        delta = codecs.differences
        self._sent: dict[Unit, Base] = {}
        self._sizes = None
        #: Measurements of the link: those for gathers' differences, and those for reductions.
        economy = None if delta is None else Economy(delta.when)
        self._exact = Economy(exact.when) if isinstance(exact, Exact) else None
        self._economies = [each for each in (economy, self._exact) if each is not None]
        if economy is not None:
            for unit, entry in self.entries.items():
                on_host = Sent(entry, economy, topology.nodes) if streams.on_host else None
                self._sent[unit] = on_host or Base(entry)
            if not streams.on_host:
                by_entry = {self.entries[unit]: each for unit, each in self._sent.items()}
                self._sizes = Sizes(by_entry, topology, streams, device)
        self.staleness = Staleness(
            [*self.entries.values()],
            topology,
            guard,
            self._begins_pass,
            lambda: self._passes.without_gradients,
            verify=setup.safety.verify,
            lacks_base=(lambda unit: not self._sent[unit].usable) if delta is not None else None,
            wishes=self._wishes if self._economies else None,
            agreed=self._agreed,
        )
        plan = MemoryPlan.of(
            self.units,
            topology,
            policy,
            look_ahead=setup.look_ahead,
            partials_place=setup.partials,
            differences=delta is not None and streams.on_host,
        )
        on_all_ranks("host memory", topology, plan.check)
        plan.announce()
        warn_of_sizes(policy, self.units, topology)
        self.cache = on_all_ranks(
            f"policy = {policy}",
            topology,
            lambda: Cache(
                self.entries,
                topology,
                device,
                streams,
                plan,
                self.ledger,
                directory=policy.directory,
                safety=setup.safety,
            ),
        )
        # Referenced, as host memory stays page-locked for as long as its arena lives.
        self._partials = on_all_ranks(
            f"partial_gradients = {setup.partials!r}",
            topology,
            lambda: Partials(plan.partials, device, self.ledger),
        )
        # One is retained: the gather inside the node reads it while the next one is filled.
        self._slices = slices = Slices(streams, streams.inter_node, retain=1)
        self._in_flight = InFlight(topology.failures)
        self._encoded: list[EncodedReduce] = []
        self._reductions: dict[Unit, HierarchicalReduceScatter] = {}
        #: Collectives that were installed on each unit, to notice when somebody replaces them.
        self._collectives: dict[Unit, tuple[Any, Any]] = {}
        for unit, entry in self.entries.items():
            gather = CachedAllGather(
                entry,
                topology,
                self.cache,
                slices,
                self.staleness,
                guard,
                streams,
                self.ledger,
                codecs.rounding,
                self._sent.get(unit),
                self._sizes,
                self._world,
            )
            unit.module.set_custom_all_gather(gather)
            self._reduce_by_hierarchy(unit, codecs)
            self._collectives[unit] = fsdp2.collectives(unit.group)
        self._follow(model)
        setattr(model, _ATTRIBUTE, self)

    def _reduce_by_hierarchy(self, unit: Unit, codecs: Codecs) -> None:
        topology = self.topology
        encoded: EncodedReduce | ExactReduce | None = None
        if (codec := codecs.rounding_reduce) is not None:
            encoded = EncodedReduce(
                codec, topology.reduce_inter, self.ledger, codecs.error_feedback
            )
            self._encoded.append(encoded)
        elif self._exact is not None:
            encoded = ExactReduce(unit.name, topology.reduce_inter, self._exact, self.ledger)
        reduction = HierarchicalReduceScatter(
            unit,
            topology,
            self._partials.of(unit),
            self._in_flight,
            self.ledger,
            encoded,
            self._world,
            self._note_crossing,
        )
        unit.module.set_custom_reduce_scatter(reduction)
        self._reductions[unit] = reduction
        on_host = topology.mesh.device_type == "cpu"
        if on_host or encoded is not None:
            # Gloo and the codecs' sums know no factor that comes before them. FSDP2 then
            # divides the sum, once and after the reduction.
            unit.module.set_force_sum_reduction_for_comms(True)
        if not on_host:
            fsdp2.allow_two_reductions(unit.module, unit.group)

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Keep gradients inside the nodes, but for the last micro-batch's, in the body.

        Flat exchanges reduce each micro-batch's.
        """
        self._hints = False
        sync = last or self._world is not None
        if not sync and (hooked := [unit.name for unit in self.units if unit.hooked]):
            raise RuntimeError(
                f"fcdp.accumulate(last=False): {hooked[0]} has a post-accumulate-gradient hook or "
                "an all-reduce hook, which would be called before the gradient has crossed nodes; "
                "run micro-batches without fcdp.accumulate, or without the hook"
            )
        for reduction in self._reductions.values():
            reduction.drop_abandoned()
        for reduction in self._reductions.values():
            reduction.requires_sync = sync
        self.cache.requires_sync = last
        try:
            with contextlib.ExitStack() as units:
                for reduction in self._reductions.values():
                    units.enter_context(reduction.accumulating())
                yield
        except BaseException as error:
            self.topology.failures.announce(error)
            self.discard()
            raise
        finally:
            self.cache.requires_sync = True
            for reduction in self._reductions.values():
                reduction.requires_sync = True

    def _note_crossing(self, unit: Unit) -> None:
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

    def discard(self) -> None:
        """Forget gradients that wait to cross nodes, or to be reduced at all."""
        for reduction in self._reductions.values():
            reduction.discard()
        self._drop_whole_gradients()

    def _drop_whole_gradients(self) -> None:
        """Forget what a backward that raised has left: FSDP2 would add it to the next gradients.

        A unit of several blocks' adapters has more of it than FSDP2's blocks would.
        """
        for unit in self.units:
            fsdp2.drop_gradients(unit.group)

    def _begins_pass(self, unit: Unit) -> bool:
        if begins := self._passes.begins_with(unit):
            self._count_pass()
            if self.cache.requires_sync:
                self.cache.begin_pass()
        return begins

    def _wishes(self) -> list[bool]:
        """Whether this rank's link has become faster, and whether it would send a difference."""
        faster = any(economy.faster for economy in self._economies)
        send = [sent.would_send() for unit, sent in self._sent.items() if unit.trainable]
        return [faster, any(send)]

    def _agreed(self, faster: bool = False, sending: bool = False) -> None:
        """Act on what the ranks have agreed: each flag is set if any rank wished so."""
        if faster:
            for economy in self._economies:
                economy.measure_again()
        for sent in self._sent.values():
            sent.sending = sending
        if self._sizes is not None:
            self._sizes.learn()

    def _count_pass(self) -> None:
        self._number += 1
        # A backward that raised has left reductions in flight: they belong to the pass before.
        self._in_flight.finish()
        self.topology.failures.begins()

    def _follow(self, model: nn.Module) -> None:
        """Hook the events after which entries may be stale (paper: dirty flags of FCDP-Comm)."""
        self._passes.follow(self.units, self._begin_pass, self._end_forward)
        for module in model.modules():
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)
            # A partial, as PyTorch sets an attribute on what it is given.
            module.register_state_dict_post_hook(functools.partial(self._after_state_dict))
        for unit in self.units:
            fsdp2.after_reset(unit.module, self._drop_whole_gradients)
            fsdp2.around_replaced(
                unit.group,
                functools.partial(self.staleness.replacing, unit),
                functools.partial(self.staleness.replaced, unit),
            )
        follow_optimizers(self)

    def _begin_pass(self) -> None:
        """A forward of the model begins."""
        self._count_pass()
        self._check_collectives_in_place()
        self._passes.drop_prefetched(self.units)
        self._passes.let_go()  # of a forward that raised or had no backward
        self.staleness.begin()
        self.cache.begin_pass()

    def _end_forward(self) -> None:
        """A forward of the model has ended, or raised."""
        self.topology.failures.forward_ends()
        if sys.exc_info()[0] is None:  # else FSDP2 is in the middle of something
            self._passes.drop_prefetched(self.units)

    def _check_collectives_in_place(self) -> None:
        """Raise ``RuntimeError`` where somebody has replaced the collectives of a unit."""
        for unit, installed in self._collectives.items():
            if fsdp2.collectives(unit.group) != installed:
                raise RuntimeError(
                    f"{unit.name}: set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem "
                    "or set_allocate_memory_from_process_group has taken the place of FCDP's "
                    "collectives; leave them alone, or do not set FCDP up"
                )

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        self.staleness.doubt()

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.staleness.loaded()
        for encoded in self._encoded:
            encoded.forget()

    def _after_state_dict(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        tensors = (state.get(prefix + name) for name, _ in module.named_parameters(recurse=False))
        # With ``keep_vars`` they are the parameters themselves, whose counters are looked at.
        self.staleness.hand_out(
            tensor
            for tensor in tensors
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter)
        )

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step.

        Raises ``RuntimeError`` where gradients still wait, and for an optimizer made before set-up.
        """
        self._strays.refuse(optimizer)
        self._crossed_in = 0
        self.staleness.begin_step(optimizer)
        self._passes.let_go()
        self._in_flight.finish()  # of a backward that raised
        self._slices.drain()
        self.cache.staging.drain()
        if not any(reduction.pending for reduction in self._reductions.values()):
            return
        ours = {id(param) for unit in self.units for param in unit.params}
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in ours for param in stepped):
            raise RuntimeError(
                "optimizer step while gradients wait to be reduced across nodes; "
                "run the last micro-batch's backward under fcdp.accumulate(model, last=True), or "
                "give the step up with fcdp.discard(model)"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        self.staleness.end_step(optimizer)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model. Raises ``ValueError`` if FCDP was not set up on it."""
    engine = getattr(model, _ATTRIBUTE, None)
    if not isinstance(engine, Engine):
        raise ValueError(
            "model: FCDP is not set up on it; pass the module that was given to fcdp.shard or "
            "fcdp.cache_parameters"
        )
    return engine


def has_engine(model: nn.Module) -> bool:
    """Whether FCDP is set up on a model or on a part of it."""
    return any(hasattr(module, _ATTRIBUTE) for module in model.modules())


def is_set_up(model: nn.Module, setup: Setup) -> bool:
    """Whether FCDP is set up on a model as ``setup`` asks for.

    Raises ``ValueError`` if it is set up otherwise.
    """
    if not has_engine(model):
        return False
    engine = getattr(model, _ATTRIBUTE, None)
    if engine is None:
        raise ValueError("model: FCDP is set up on a part of it already")
    before = engine.setup
    if setup.sharding is None:  # ``cache_parameters`` asks for no arguments of the sharding
        before = replace(before, sharding=None)
    if before != setup:
        raise ValueError(
            f"model: FCDP is set up on it already, with {before.differences(setup)}; must be equal"
        )
    return True


def _has_gradient(param: DTensor) -> bool:
    """Whether a gradient waits for a step that nobody has zeroed; the host waits to see it."""
    return param.grad is not None and bool(param.grad._local_tensor.any())  # type: ignore[attr-defined]


def _check_collectives(unit: Unit) -> None:
    """Raise ``ValueError`` for a unit whose collectives are not FSDP2's own."""
    collectives = fsdp2.collectives(unit.group)
    if isinstance(collectives[0], CachedAllGather):
        raise ValueError("model: FCDP is set up on it already, as a part of another model")
    for comm in collectives:
        if not fsdp2.is_default(comm):
            raise ValueError(
                f"{unit.name}: has a custom collective, {type(comm).__name__}, whose place FCDP "
                "would take; must be FSDP2's own"
            )
