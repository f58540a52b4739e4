"""What FCDP adds to one FSDP2 model: its units, cache, hooks and ledger, with one lifetime."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fcdp.cache import Cache, Safety
from fcdp.codec import Codecs
from fcdp.encoded import EncodedReduce, check_encodable
from fcdp.exchange import any_rank
from fcdp.gather import CachedGather
from fcdp.ledger import Ledger, in_backward
from fcdp.plan import Plan
from fcdp.policy import CachePolicy
from fcdp.reduce import HierarchicalReduce
from fcdp.replicas import Replicas
from fcdp.staleness import Staleness
from fcdp.sums import SumsMaker, SumsPlace
from fcdp.topology import Topology
from fcdp.unit import find_units

_ATTRIBUTE = "_fcdp_engine"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """What ``fcdp.cache_parameters`` may be asked for beside the policy.

    Raises ``ValueError`` for what cannot be.
    """

    look_ahead: int
    sums: SumsPlace
    safety: Safety
    codecs: Codecs

    def __post_init__(self) -> None:
        if self.look_ahead < 0:
            raise ValueError(f"look_ahead = {self.look_ahead}: must be 0 or more")
        if self.sums not in get_args(SumsPlace):
            allowed = ", ".join(get_args(SumsPlace))
            raise ValueError(f"sums = {self.sums!r}: must be one of {allowed}")


class Engine:
    """Installs the custom collectives on every unit and follows what makes entries stale."""

    def __init__(
        self,
        model: nn.Module,
        topology: Topology,
        policy: CachePolicy,
        options: Options,
        *,
        replicated: Sequence[nn.Parameter] = (),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        if has_engine(model):
            raise ValueError("model: FCDP is set up on it already")
        self.topology = topology
        self.units = find_units(model, topology)
        codecs = options.codecs
        if codecs.gather is not None:
            check_encodable(self.units)
        self.ledger = Ledger()
        self.staleness = Staleness(self.units, topology, verify=options.safety.verify)
        self._gathers: list[CachedGather] = []
        self._encoded: list[EncodedReduce] = []
        self._replicas = Replicas(
            replicated, topology, _device(topology), self.ledger, reduce_dtype
        )
        self._reduces: list[HierarchicalReduce | Replicas] = [self._replicas]
        plan = Plan.of(
            self.units, topology, policy, look_ahead=options.look_ahead, sums_place=options.sums
        )
        on_all_ranks("host memory", topology, plan.check)
        plan.announce()
        self.cache = on_all_ranks(
            f"policy = {policy}",
            topology,
            lambda: Cache(
                topology,
                _device(topology),
                plan,
                self.ledger,
                directory=policy.directory,
                safety=options.safety,
            ),
        )
        # Kept: host memory stays page-locked for as long as its arena lives.
        self._sums = on_all_ranks(
            f"sums = {options.sums!r}",
            topology,
            lambda: SumsMaker(options.sums, self.units, topology, _device(topology), self.ledger),
        )
        for unit in self.units:
            encoded = EncodedReduce.of(codecs, topology.inter, self.ledger)
            if encoded is not None:
                self._encoded.append(encoded)
            gather = CachedGather(
                unit, topology, self.cache, self.staleness, self.ledger, codecs.gather
            )
            reduce = HierarchicalReduce(
                unit,
                topology,
                self._sums.of(unit),
                self.ledger,
                encoded,
            )
            self._gathers.append(gather)
            unit.module.set_custom_all_gather(gather)
            unit.module.set_custom_reduce_scatter(reduce)
            if topology.mesh.device_type == "cpu" or encoded is not None:
                # Gloo and the codecs' sums know no factor that comes before them. FSDP2 then
                # divides the sum, once and after the reduction.
                unit.module.set_force_sum_reduction_for_comms(True)
            self._reduces.append(reduce)
        self._follow(model)
        setattr(model, _ATTRIBUTE, self)

    @contextlib.contextmanager
    def deferring(self, deferring: bool) -> Iterator[None]:
        """Keep gradient sums inside the nodes for backwards that run within."""
        for reduce in self._reduces:
            reduce.deferring = deferring
        try:
            yield
        except BaseException:
            for reduce in self._reduces:
                reduce.discard()
            raise
        finally:
            for reduce in self._reduces:
                reduce.deferring = False

    def _follow(self, model: nn.Module) -> None:
        """Hook the events after which entries may be stale (paper: dirty flags of FCDP-Comm)."""
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        for module in model.modules():
            module.register_load_state_dict_post_hook(self._after_load)
            module.register_state_dict_pre_hook(self._before_state_dict)
        # Optimizers made before or after, by whomever: only a global hook sees them all. It must
        # not keep the model alive.
        this = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (engine := this()) is not None:
                engine._before_step(optimizer)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (engine := this()) is not None:
                engine.staleness.stepped(optimizer)

        for handle in (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ):
            weakref.finalize(self, handle.remove)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():  # a recomputation belongs to the forward that it repeats
            self._drop_unused()
            self._replicas.make_equal()
            self.staleness.ask()
            self.cache.step_begins()

    def _drop_unused(self) -> None:
        """Forget what an earlier forward prefetched and then skipped: it may be stale by now."""
        for unit, gather in zip(self.units, self._gathers, strict=True):
            if gather.pending:
                unit.module.unshard()
                unit.module.reshard()

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self.staleness.invalidate()
        for encoded in self._encoded:
            encoded.forget()

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.staleness.hand_out()

    def _before_step(self, optimizer: Optimizer) -> None:
        if not any(reduce.pending for reduce in self._reduces):
            return
        ours = {id(param) for unit in self.units for param in unit.params}
        ours.update(map(id, self._replicas.params))
        stepped = (param for group in optimizer.param_groups for param in group["params"])
        if any(id(param) in ours for param in stepped):
            raise RuntimeError(
                "optimizer step while gradients wait to be reduced across nodes; "
                "run the last micro-batch's backward under fcdp.accumulate(model, last=True)"
            )


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
    return any(hasattr(module, _ATTRIBUTE) for module in model.modules())


def _device(topology: Topology) -> torch.device:
    kind = topology.mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def on_all_ranks(what: str, topology: Topology, build: Callable[[], _T]) -> _T:
    """Build on all ranks or on none: one that fails must not leave others waiting.

    Raises what ``build`` raised, and ``RuntimeError`` about ``what`` where only others failed.
    """
    built: list[_T] = []
    error = None
    try:
        built.append(build())
    except Exception as caught:
        error = caught
    (failed,) = any_rank([error is not None], topology)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what}: another rank failed")
    return built[0]
