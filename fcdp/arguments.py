"""Arguments of users, checked before anything is sharded: the field, the value, what is allowed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, is_dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fcdp.blocks import find_blocks
from fcdp.cache import named
from fcdp.cache.policy import Budget, CachePolicy
from fcdp.extensions import check_held
from fcdp.grouping import entry_bytes
from fcdp.hooks import LosslessCodec
from fcdp.options import CacheOptions, CommOptions
from fcdp.partition import Block, modules_of
from fcdp.sizes import in_words
from fcdp.topology import Topology
from fcdp.unit import Unit, entry_size

logger = logging.getLogger("fcdp")

#: Names of one parameter that an error lists.
_NAMED = 3


@dataclass(frozen=True)
class Setup:
    """All that an engine was asked for: setting up again with the same changes nothing."""

    #: Nodes, and ranks per node.
    shape: tuple[int, int]
    policy: CachePolicy
    _: KW_ONLY
    cache: CacheOptions
    comm: CommOptions
    #: Arguments of ``fcdp.shard`` beside these; ``None`` after ``cache_parameters``.
    sharding: Mapping[str, Any] | None = None

    @property
    def alike(self) -> dict[str, Any]:
        """What ranks must have alike: options, and the class of the policy, whose sizes may differ.

        Of an object that shows where it lies, the class.
        """
        options = {**vars(self.cache), **vars(self.comm)}
        shown = {
            name: value
            if isinstance(value, str | int | None) or is_dataclass(value)
            else type(value)
            for name, value in options.items()
        }
        return {"policy": type(self.policy), **shown}

    def differences(self, other: Setup) -> str:
        """List arguments and fields of options that differ in ``other``, with both values."""
        theirs = other._arguments()
        different = [
            f"other {name}"
            if name in ("units", "ignored_params")  # modules, which are long to show
            else f"{name} = {value!r} (now {theirs.get(name)!r})"
            for name, value in self._arguments().items()
            if value != theirs.get(name)
        ]
        return ", ".join(different) or "fcdp.cache_parameters"

    def _arguments(self) -> dict[str, Any]:
        return {
            "topology": "{} nodes × {} ranks".format(*self.shape),
            "policy": self.policy,
            **vars(self.cache),
            **vars(self.comm),
            **(self.sharding or {}),
        }


def check_topology(topology: Any) -> None:
    """Raise ``ValueError`` for what is no topology, without which ranks cannot tell each other."""
    if not isinstance(topology, Topology):
        raise ValueError(
            f"topology = {_shown(topology)}: must be a fcdp.Topology: Topology.from_env() under "
            "torchrun, or Topology.of_mesh(mesh) of a DeviceMesh"
        )


def check_kinds(
    model: Any,
    *,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    cache: Any = CacheOptions(),
    comm: Any = CommOptions(),
) -> None:
    """Raise ``ValueError`` for an argument of another type than its name says.

    So it does where parameters or memory would be tensors of ``torch.inference_mode()``.
    """
    for name, value, kind, what in (
        ("model", model, nn.Module, "torch.nn.Module"),
        (
            "mp_policy",
            mp_policy,
            MixedPrecisionPolicy,
            "torch.distributed.fsdp.MixedPrecisionPolicy",
        ),
        ("offload_policy", offload_policy, OffloadPolicy, "torch.distributed.fsdp.OffloadPolicy"),
        ("cache", cache, CacheOptions, "fcdp.CacheOptions"),
        ("comm", comm, CommOptions, "fcdp.CommOptions"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} = {_shown(value)}: must be a {what}")
    # FSDP2 makes others of plain parameters.
    shards = (param._local_tensor for param in model.parameters() if isinstance(param, DTensor))
    if torch.is_inference_mode_enabled() or any(shard.is_inference() for shard in shards):
        raise ValueError(
            "model: is set up, or was sharded, under torch.inference_mode(), whose tensors nothing "
            "can write to afterwards; do both outside of it, and forwards inside"
        )


def policy_of(policy: Any) -> CachePolicy:
    """The policy itself, or the one of a name as matrix files write it.

    Raises ``ValueError`` for another name, a class in an instance's place, and what is no policy.
    """
    if isinstance(policy, str):
        return named.parse(policy)
    if isinstance(policy, type) or not callable(getattr(policy, "place", None)):
        raise ValueError(
            f"policy = {_shown(policy)}: must be a policy such as fcdp.HostCache(), or a name: "
            f"{', '.join(named.FORMS)}"
        )
    checked: CachePolicy = policy
    return checked


def blocks_of(model: nn.Module, units: Any) -> list[list[nn.Module]]:
    """The modules to gather one at a time: those given, or the blocks that the model has.

    Raises ``ValueError`` where they are not distinct modules inside the model, and where none are
    given and none are found.
    """
    if units is None:
        return [[block] for block in find_blocks(model)]
    if not isinstance(units, Iterable) or isinstance(units, nn.ModuleDict | str):
        raise ValueError(
            f"units = {_shown(units)}: must be a list of modules, such as model.layers; left out, "
            "the model's blocks are found"
        )
    inside = set(model.modules())
    places: dict[nn.Module, str] = {}
    blocks: list[list[nn.Module]] = []
    for index, given in enumerate(units):
        blocks.append([*given] if isinstance(given, list | tuple) else [given])
        if not blocks[-1]:
            raise ValueError(f"units[{index}]: is an empty list; must have a module or more")
        for place, module in enumerate(blocks[-1]):
            where = f"units[{index}]" + f"[{place}]" * (module is not given)
            if not isinstance(module, nn.Module):
                raise ValueError(f"{where} = {_shown(module)}: must be a module of the model")
            if module not in inside:
                what = type(module).__name__
                raise ValueError(f"{where}: {what} is not a submodule of the model")
            if module is model:
                raise ValueError(f"{where}: is the model itself; pass its blocks")
            if module in places:
                raise ValueError(f"{where}: is {places[module]} again; each counts once")
            places[module] = where
    return blocks


def check_parts(model: nn.Module, blocks: Sequence[Block], ignored: Set[nn.Parameter]) -> None:
    """Raise ``ValueError`` for what FSDP2 would refuse once it has sharded parts of the model."""
    names = {module: name for name, module in model.named_modules()}
    #: The modules of each unit that holds a parameter, by the unit's place.
    holders: dict[nn.Parameter, dict[int, Block]] = {}
    for at, block in enumerate([*blocks, [model]]):
        for module in block:
            if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _has_forward(module):
                raise ValueError(f"units: {names[module]} has no forward; pass its members")
        for module in modules_of(block, blocks):
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"{names[module]}: is a ScriptModule, which FSDP2 cannot hook; must be the "
                    "module before torch.jit.script"
                )
            for own, param in module.named_parameters(recurse=False):
                if param in ignored:
                    continue
                name = f"{names[module]}.{own}".removeprefix(".")
                if is_lazy(param):
                    raise ValueError(f"{name}: has no shape yet; call the model once before")
                check_held(name, param)
                if not param.ndim:
                    raise ValueError(f"{name}: has no dimension to shard; make its shape (1,)")
                if param.layout != torch.strided or not param.is_contiguous():
                    raise ValueError(
                        f"{name}: its memory is not contiguous; must be, as FSDP2 asks"
                    )
                unit = [module] if block[0] is model else block
                holders.setdefault(param, {}).setdefault(at, unit)
    for param, held in holders.items():
        if len(held) > 1:
            called = [
                name
                for name, each in model.named_parameters(remove_duplicate=False)
                if each is param
            ]
            more = f", {len(called) - _NAMED} more" if len(called) > _NAMED else ""
            holding = [module for unit in held.values() for module in unit]
            together = ", ".join(f"model.{names[module]}" for module in holding)
            raise ValueError(
                f"units: {', '.join(called[:-1][: _NAMED - 1])}{more} and {called[-1]} are one "
                f"parameter, in {'two' if len(held) == 2 else len(held)} units; "
                + (
                    f"must be in one: a list of modules, units=[[{together}], ...]"
                    if all(module is not model and _has_forward(module) for module in holding)
                    else "one is the model's own, which holds it itself or in a module that has no "
                    "forward: leave the other units out of units"
                )
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def load_codecs(comm: CommOptions, topology: Topology) -> None:
    """Import what lossless codecs need, on all ranks or on none. Collective.

    Raises ``ValueError`` on all ranks where one lacks it.
    """
    for codec in (comm.gather_codec, comm.reduce_codec):
        if isinstance(codec, LosslessCodec):
            codec.load(topology)


def check_plain(model: nn.Module, topology: Topology, ignored: Set[nn.Parameter]) -> None:
    """Raise ``ValueError`` for a model that is sharded already, but by tensor parallelism."""
    for name, param in model.named_parameters():
        if param in ignored:
            continue
        if isinstance(param, DTensor) and not topology.is_beside(param.device_mesh):
            raise ValueError(
                f"{name}: is a DTensor on mesh {param.device_mesh}; fcdp.shard takes plain "
                "parameters and those of tensor parallelism, whose mesh must be of other "
                "dimensions of the mesh that the topology is of (Topology.of_mesh(mesh['dp'])); "
                "for a model that fully_shard has sharded call fcdp.cache_parameters"
            )


def warn_without_blocks(blocks: Sequence[Block], topology: Topology) -> None:
    """Rank 0 says once what an empty list of units means."""
    if not blocks and topology.rank == 0:
        logger.warning(
            "fcdp.shard: units is empty, so that the whole model is gathered at once and stays "
            "gathered; pass its blocks, or leave units out"
        )


def warn_of_sizes(policy: CachePolicy, units: Sequence[Unit], topology: Topology) -> None:
    """Rank 0 says that a budget is too small for any unit, as one in GiB by mistake is."""
    if not isinstance(policy, Budget) or topology.nodes == 1 or topology.rank:
        return
    smallest = min(entry_size(unit) for unit in units)
    for name in ("device", "host", "disk"):
        size = getattr(policy, name)
        if 0 < size < smallest:
            logger.warning(
                f"policy: {name} = {size}: no unit fits, the smallest takes {in_words(smallest)}; "
                "sizes are bytes per rank, 2**30 for a GiB"
            )


def mixes(unit: Unit) -> bool:
    """Whether it has a few trained parameters among frozen ones."""
    if len({param.requires_grad for param in unit.params}) < 2:
        return False
    frozen, trained = _bytes_by_kind(unit)
    return frozen > trained


def warn_of_mixed(units: Sequence[Unit], topology: Topology, *, later: bool = False) -> bool:
    """Rank 0 says what frozen parameters cost that share units with a few trained ones.

    A group of FSDP2's is gathered whole: what is frozen in it is stale with what is trained.
    ``later``: since set-up others have come to require gradients. Returns whether it has spoken.
    """
    if topology.nodes == 1 or topology.rank or not (mixed := [*filter(mixes, units)]):
        return False
    frozen, trained = map(sum, zip(*map(_bytes_by_kind, mixed), strict=True))
    what, instead = (
        (
            "requires_grad has changed since set-up",
            f"{trained:,} would, had just these, and what takes turns with them, required "
            "gradients at fcdp.shard",
        )
        if later
        else (
            "fcdp.cache_parameters",
            f"Sharded by fcdp.shard instead of fully_shard {trained:,} would; in other people's "
            "trainers, fcdp.integrations does that",
        )
    )
    logger.warning(
        f"{what}: {len(mixed)} units, such as {mixed[0].name}, have a few trained parameters among "
        "frozen ones, so that all of them cross nodes each step: "
        f"{frozen + trained:,} bytes per rank. {instead}"
    )
    return True


def _bytes_by_kind(unit: Unit) -> tuple[int, int]:
    """Bytes that a gather across nodes sends of this rank: frozen ones, and trained ones."""
    parts = [0, 0]
    for param, (numel, dtype) in zip(unit.params, unit.parts, strict=True):
        parts[param.requires_grad] += entry_bytes(numel * dtype.itemsize, unit.topology.nodes)
    return parts[0], parts[1]


def _shown(value: Any) -> str:
    """Show the value if it is a text or a number, else its type."""
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__name__} (the class, not {value.__name__}())"
    return type(value).__name__
