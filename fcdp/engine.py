"""Engine of one FSDP2 model: FCDP's units, cache, hooks and ledger, with one lifetime."""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.optim import Optimizer

from fcdp import fsdp2
from fcdp.agreement import check_alike, on_all_ranks
from fcdp.all_gather import CachedAllGather, DeviceGather, HostGather, Shared
from fcdp.arguments import Setup, mixes, warn_of_mixed, warn_of_sizes
from fcdp.cache.cache import Cache, Entry
from fcdp.cache.memory_plan import MemoryPlan
from fcdp.counts import Ledger, in_backward
from fcdp.guard import Guard
from fcdp.hooks import (
    EngineParts,
    GatherExtension,
    GatherHook,
    LosslessGather,
    LosslessReduce,
    ReduceExtension,
    ReduceHook,
)
from fcdp.in_flight import HostReduceScatter, InFlight
from fcdp.optimizers import StaleOptimizers, follow_optimizers
from fcdp.options import CommOptions
from fcdp.partial_gradients import Partials
from fcdp.pass_controller import PassController, untraced
from fcdp.reduce_scatter import HierarchicalReduceScatter
from fcdp.rounding import RoundedGather, RoundedReduce, check_dtypes
from fcdp.staleness import Staleness
from fcdp.streams import Slices, Streams
from fcdp.topology import Topology
from fcdp.unit import Unit, find_units

logger = logging.getLogger("fcdp")

#: Where a model has its engine.
ATTRIBUTE = "_fcdp_engine"


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
        comm = setup.comm
        self.units = find_units(model, topology)
        cached = on_all_ranks("model", topology, lambda: _checked(self.units, comm, topology))
        self._flat = comm.exchanges == "flat" and topology.nodes > 1
        #: Whether gradients of each micro-batch cross nodes, as with flat exchanges they always do.
        self._reduces_each = self._flat or comm.partial_gradients == "each"
        self.ledger = Ledger()
        #: Units that FCDP gathers; FSDP2 gathers those that lie within one node of several.
        self.entries = {unit: Entry(unit) for unit in cached}
        self._streams = streams = Streams(_device(topology))
        detects = setup.cache.detect_writes and topology.nodes > 1
        self._guard = Guard(cached, streams, detects=detects)
        groups = [unit.group for unit in self.units]
        self._stale_optimizers = StaleOptimizers(
            model, before, groups=groups, warns=topology.rank == 0
        )
        self.staleness = Staleness([*self.entries.values()], topology, self._guard)
        plan = self._plan_memory()
        self.cache = on_all_ranks(f"policy = {setup.policy}", topology, lambda: self._cache(plan))
        # Referenced, as host memory stays page-locked for as long as its arena lives.
        self._partials = Partials(plan.partials, streams, self.ledger)
        # One is retained: the gather inside the node reads it while the next one is filled.
        self._slices = Slices(streams, streams.inter_node, retain=1)
        self._in_flight = InFlight(topology.failures)
        self._extend()
        ids = {*map(id, not_resharded)}
        self.controller = PassController(
            model,
            [*self.entries.values()],
            topology,
            cache=self.cache,
            staleness=self.staleness,
            guard=self._guard,
            in_flight=self._in_flight,
            gathers=self._gathers,
            reductions=self._lossless,
            look_ahead=setup.cache.look_ahead,
            verify=setup.cache.verify,
            not_resharded=[unit for unit in cached if id(unit.module) in ids],
        )
        #: Units of which nothing was said at set-up, should other parameters be trained later.
        self._unmixed = [unit for unit in self.units if not mixes(unit)]
        #: Whether a micro-batch runs under ``accumulate``.
        self._accumulating = False
        self._rounded: list[RoundedReduce] = []
        self._reductions: dict[Unit, HierarchicalReduceScatter] = {}
        #: Collectives that were installed on each unit, to notice when somebody replaces them.
        self._collectives: dict[Unit, tuple[Any, Any]] = {}
        self._install(comm.intra_node)
        # FSDP2's own exchanges too: over replicas, and of units that lie within one node.
        for mesh in {param.device_mesh for unit in self.units for param in unit.params}:
            topology.failures.cover(mesh.get_all_groups(), seen=False)
        if comm.partial_gradients == "host":
            self._allocate_partials()
        if len({unit.topology for unit in self.units}) > 1:
            # Ranks that call other experts gather ahead at other times, and must ask nobody then.
            asked = [each for each in self.entries.values() if each.fallible and each.unit.reuses]
            for unit in self.units:
                fsdp2.prefetch_nothing(
                    unit.module, lambda: not all(entry.settled for entry in asked)
                )
        self._follow(model)
        setattr(model, ATTRIBUTE, self)

    def _plan_memory(self) -> MemoryPlan:
        """Plan what lies where, and say so. Raises on all ranks where memory is lacking on one."""
        setup, topology = self.setup, self.topology
        lossless = isinstance(setup.comm.gather_codec, LosslessGather)
        units = [*self.entries]
        plan = MemoryPlan.choose(
            units,
            topology,
            setup.policy,
            partial_gradients="each" if self._reduces_each else setup.comm.partial_gradients,
            device=self._streams.device,
            look_ahead=setup.cache.look_ahead,
            differences=lossless and self._streams.on_host,
        )
        tiers = [plan.placement.preferences[unit] for unit in units]
        check_alike(topology, **{f"policy = {setup.policy}, by the tiers of its units": tiers})
        on_all_ranks("host memory", topology, plan.check)
        plan.announce()
        warn_of_sizes(setup.policy, units, topology)
        return plan

    def _cache(self, plan: MemoryPlan) -> Cache:
        return Cache(
            self.entries,
            self._streams,
            plan=plan,
            ledger=self.ledger,
            directory=self.setup.policy.directory,
            verify=self.setup.cache.verify,
            poison=self.setup.cache.poison,
        )

    def _extend(self) -> None:
        """Make the extensions of lossless codecs, which take part in what the ranks agree on."""
        comm = self.setup.comm
        parts = EngineParts(
            entries=self.entries,
            cache=self.cache,
            streams=self._streams,
            ledger=self.ledger,
        )
        self._gathers: GatherExtension | None = None
        if isinstance(comm.gather_codec, LosslessGather):
            self._gathers = comm.gather_codec.extend(parts)
        self._lossless: ReduceExtension | None = None
        if isinstance(comm.reduce_codec, LosslessReduce):
            self._lossless = comm.reduce_codec.extend(parts)

    def _install(self, intra_node: fsdp2.AllGather | None) -> None:
        """Take the place of FSDP2's collectives."""
        shared = Shared(
            controller=self.controller,
            cache=self.cache,
            guard=self._guard,
            streams=self._streams,
            slices=self._slices,
            ledger=self.ledger,
            intra_node=intra_node,
        )
        transport = HostGather if self._streams.on_host else DeviceGather
        for unit, entry in self.entries.items():
            gather = transport(entry, shared, self._gather_hook(unit), world=self._world(unit))
            fsdp2.set_collectives(unit.group, gather, self._reduction(unit))
            self._collectives[unit] = fsdp2.collectives(unit.group)

    def _world(self, unit: Unit) -> dist.ProcessGroup | None:
        """The ranks of flat exchanges, by FSDP2's own group of them; ``None``: hierarchical."""
        return unit.topology.mesh.get_group() if self._flat else None

    def _gather_hook(self, unit: Unit) -> GatherHook | None:
        codec = self.setup.comm.gather_codec
        if self._gathers is not None:
            return self._gathers.hook(unit)
        assert not isinstance(codec, LosslessGather), "its extension makes the hooks"
        return None if codec is None else RoundedGather(codec, unit.topology)

    def _reduce_hook(self, unit: Unit) -> ReduceHook | None:
        comm = self.setup.comm
        if self._lossless is not None:
            return self._lossless.hook(unit)
        assert not isinstance(comm.reduce_codec, LosslessReduce), "its extension makes the hooks"
        if comm.reduce_codec is None:
            return None
        group, feedback = unit.topology.reduce_inter, comm.error_feedback
        rounded = RoundedReduce(comm.reduce_codec, group, self.ledger, error_feedback=feedback)
        self._rounded.append(rounded)
        return rounded

    def _reduction(self, unit: Unit) -> HierarchicalReduceScatter:
        """Make the reduction of one unit, and have FSDP2 ask it for what it can do."""
        hook = self._reduce_hook(unit)
        parts: dict[str, Any] = {
            "partials": self._partials.of(unit),
            "ledger": self.ledger,
            "hook": hook,
            "world": self._world(unit),
            "crosses": self.controller.note_crossing,
        }
        on_host = self._streams.on_host
        reduction = self._reductions[unit] = (
            HostReduceScatter(unit, self._in_flight, **parts)
            if on_host
            else HierarchicalReduceScatter(unit, **parts)
        )
        if (on_host or hook is not None) and unit.topology.world_size > 1:
            # Gloo and the codecs' sums know no factor that comes before them. FSDP2 then
            # divides the sum, once and after the reduction; but twice what one rank has alone,
            # which it does not reduce.
            fsdp2.force_sums(unit.group)
        if not on_host:
            fsdp2.allow_two_reductions(unit.module, unit.group)
        return reduction

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Keep gradients inside the nodes, but for the last micro-batch's, in the body.

        Flat exchanges and ``partial_gradients="each"`` reduce each micro-batch's.
        """
        if self._accumulating:
            raise RuntimeError(
                "fcdp.accumulate: is called inside of fcdp.accumulate; each micro-batch has one"
            )
        self.controller.accumulates()
        sync = last or self._reduces_each
        if not sync and (hooked := [unit.name for unit in self.entries if unit.hooked]):
            raise RuntimeError(
                f"fcdp.accumulate(last=False): {hooked[0]} has a post-accumulate-gradient hook or "
                "an all-reduce hook, which would be called before the gradient has crossed nodes; "
                "run micro-batches without fcdp.accumulate, or without the hook"
            )
        if not sync:
            self._allocate_partials()
        for reduction in self._reductions.values():
            reduction.drop_abandoned()
        for reduction in self._reductions.values():
            reduction.requires_sync = sync
        self.controller.requires_sync = last
        self._accumulating = True
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
            self._accumulating = False
            self.controller.requires_sync = True
            for reduction in self._reductions.values():
                reduction.requires_sync = True

    def _allocate_partials(self) -> None:
        """Allocate host memory for partial gradients once, on all ranks or none.

        Where nobody asked for the host, that is when the first sum needs it: a training that does
        not accumulate takes none.
        """
        if self._partials.lacks_memory:
            what = f"partial_gradients = {self.setup.comm.partial_gradients!r}"
            on_all_ranks(what, self.topology, self._partials.allocate)

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

    def _follow(self, model: nn.Module) -> None:
        """Hook the events after which entries may be stale (paper: dirty flags of FCDP-Comm)."""
        model.register_forward_pre_hook(untraced(self._check_in_place), prepend=True)
        for module in model.modules():
            module.register_load_state_dict_pre_hook(_Hook(self._before_load))
            module.register_load_state_dict_post_hook(_Hook(self._after_load))
            module.register_state_dict_post_hook(_Hook(self._after_state_dict))
        for unit in self.units:
            fsdp2.after_reset(unit.module, self._drop_whole_gradients)
            fsdp2.make_ordinary_tensors(unit.group)
        for unit in self.entries:
            fsdp2.around_replaced(
                unit.group,
                functools.partial(self.staleness.replacing, unit),
                functools.partial(self.staleness.replaced, unit),
            )
        follow_optimizers(self)

    def _check_in_place(self, module: nn.Module, args: Any) -> None:
        """Raise ``RuntimeError`` where somebody has replaced the collectives of a unit."""
        if in_backward():  # a recomputation
            return
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
        for rounded in self._rounded:
            rounded.forget()

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
        self._stale_optimizers.refuse(optimizer)
        if warn_of_mixed(self._unmixed, self.topology, later=True):
            self._unmixed = []
        self.staleness.begin_step(optimizer)
        self.controller.before_step()
        self._slices.drain()
        self.cache.staging.drain()
        self._partials.drain()
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


class _Hook:
    """A module's call of its engine, which copies of the module do not make.

    A load into one, as one rank alone may keep averages, is no write to the model.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model. Raises ``ValueError`` if FCDP was not set up on it."""
    engine = getattr(model, ATTRIBUTE, None)
    if not isinstance(engine, Engine):
        raise ValueError(
            "model: FCDP is not set up on it; pass the module that was given to fcdp.shard or "
            "fcdp.cache_parameters"
        )
    return engine


def has_engine(model: nn.Module) -> bool:
    """Whether FCDP is set up on a model or on a part of it."""
    return any(hasattr(module, ATTRIBUTE) for module in model.modules())


def is_set_up(model: nn.Module, setup: Setup) -> bool:
    """Whether FCDP is set up on a model as ``setup`` asks for.

    Raises ``ValueError`` if it is set up otherwise.
    """
    if not has_engine(model):
        return False
    engine = getattr(model, ATTRIBUTE, None)
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


def _device(topology: Topology) -> torch.device:
    """This rank's device."""
    device = torch.device(topology.mesh.device_type)
    if device.type == "cpu":
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _checked(units: Sequence[Unit], comm: CommOptions, topology: Topology) -> list[Unit]:
    """The units that FCDP gathers: on several nodes, those with ranks on more than one.

    Raises ``ValueError`` where there are none, or one cannot be gathered and reduced as asked for.
    """
    across = [unit for unit in units if unit.topology.nodes > 1 or topology.nodes == 1]
    if not across:
        raise ValueError(
            "model: each of its units is sharded within one node, so that no gather crosses nodes; "
            "shard some of it over several nodes, or leave it to FSDP2"
        )
    for unit in across:
        _check_collectives(unit)
    _check_codecs(comm, across, topology)
    return across


def _check_codecs(comm: CommOptions, units: Sequence[Unit], topology: Topology) -> None:
    """Raise ``ValueError`` for a codec that these units, or this kind of device, cannot have."""
    codec = comm.gather_codec
    if isinstance(codec, LosslessGather):
        codec.check(units)
    elif codec is not None:
        what = "floating dtype"
        check_dtypes(units, codec, lambda dtype: dtype.is_floating_point, what=what)
    if isinstance(comm.reduce_codec, LosslessReduce):
        comm.reduce_codec.check(topology)


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
