"""The public functions."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fcdp.cache import CachePolicy, HostCache
from fcdp.engine import Engine, engine_of, has_engine
from fcdp.ledger import Ledger
from fcdp.topology import Topology

#: What may share a unit: one dtype, and either all frozen or all trainable.
_Key = tuple[torch.dtype, bool]


def shard(
    model: nn.Module,
    topology: Topology,
    *,
    units: Iterable[nn.Module],
    policy: CachePolicy = HostCache(),
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward: bool | None = None,
) -> nn.Module:
    """Shard ``model`` with FSDP2 and cache its gathered parameters, in place.

    ``units`` are the modules to gather one at a time, usually the transformer blocks. Inside each,
    parameters that differ in dtype or in ``requires_grad`` get units of their own: the adapters of
    a block gather together, apart from its frozen weights (paper: FCDP-Comm). Freeze and add
    adapters before. Make the optimizer after.

    ``mp_policy``, ``offload_policy`` and ``reshard_after_forward`` mean what they mean to
    ``fully_shard``. By default adapters stay gathered from forward to backward if all of them
    together are no larger than the slice of one block that a rank gathers across nodes.

    Raises ``ValueError`` for a model that is sharded already, parameters that are DTensors (tensor
    parallelism), a unit outside the model, or too little host memory.
    """
    blocks = list(units)
    _check_plain(model, blocks)
    separate = {block: _separate(block, blocks) for block in [*blocks, model]}
    keep = reshard_after_forward is None and _fit_in_a_slice(separate, topology)
    for block, groups in separate.items():
        for group in [*groups, [block]]:
            fully_shard(
                group,
                mesh=topology.mesh,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                reshard_after_forward=False if keep and group in groups else reshard_after_forward,
            )
    if topology.mesh.device_type == "cpu":
        stages = [[block, *(group[0] for group in separate[block])] for block in blocks]
        _prefetch_forward([[model], *stages])
    return cache_parameters(model, topology, policy)


def cache_parameters(
    model: nn.Module,
    topology: Topology,
    policy: CachePolicy = HostCache(),
) -> nn.Module:
    """Cache the gathered parameters of a model that ``fully_shard`` has already sharded.

    The model must be sharded over ``topology.mesh`` or a 1-D mesh over the same ranks. Collective:
    every rank calls it. Raises ``ValueError`` for a model not sharded by FSDP2, sharded over
    several dimensions, or cached already, and for too little host memory.
    """
    if has_engine(model):
        raise ValueError("model: FCDP is set up on it already")
    Engine(model, topology, policy)
    return model


def accumulate(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Run one micro-batch's backward of several between two optimizer steps.

    With ``last=False`` gradients are summed inside the node only, and ``.grad`` stays zero; with
    ``last=True`` the sums cross nodes once, and ``.grad`` holds the total. The sums wait in device
    memory: 1/L of the model's gradients a rank, in fp32. An exception inside drops them: begin the
    step's micro-batches again.
    """
    return engine_of(model).deferring(not last)


def invalidate(model: nn.Module) -> None:
    """Declare the parameters written, after a write that PyTorch does not show.

    Such are writes through ``param.data`` or a raw pointer. Optimizer steps, ``load_state_dict``
    and in-place operations on parameters are seen without it. Every rank calls it.
    """
    engine_of(model).staleness.invalidate()


def ledger(model: nn.Module) -> Ledger:
    """Bytes that this rank moved, by link and phase."""
    return engine_of(model).ledger


def _prefetch_forward(stages: Sequence[Sequence[nn.Module]]) -> None:
    """Start the gathers of each block and of its adapters while the block before it computes.

    Where one thread both computes and issues gathers (gloo), nothing overlaps unless it is issued
    early. On CUDA the host runs ahead by itself.
    """
    for (module, *_), following in pairwise(stages):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(
            [unit for unit in following if isinstance(unit, FSDPModule)]
        )


def _check_plain(model: nn.Module, blocks: list[nn.Module]) -> None:
    inside = set(model.modules())
    for index, block in enumerate(blocks):
        if block not in inside:
            raise ValueError(
                f"units[{index}]: {type(block).__name__} is not a submodule of the model"
            )
        if block is model:
            raise ValueError(f"units[{index}]: is the model itself; pass its blocks")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"{name}: is a DTensor on mesh {param.device_mesh}; fcdp.shard takes plain "
                "parameters (tensor parallelism is not supported; for a model that fully_shard "
                "has sharded call fcdp.cache_parameters)"
            )


def _separate(block: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Groups of leaf modules that must not share the block's own unit.

    The block keeps the kind of parameter that it has most of. A module that holds several kinds
    itself, or is never called (``ParameterList``), cannot be split off and stays with the block.
    """
    holders = [module for module in _own_modules(block, blocks) if _kinds(module)]
    sizes: dict[_Key, int] = defaultdict(int)
    for module in holders:
        for key, numel in _kinds(module).items():
            sizes[key] += numel
    if len(sizes) < 2:
        return []
    stays = max(sizes, key=lambda key: sizes[key])
    groups: dict[_Key, list[nn.Module]] = defaultdict(list)
    for module in holders:
        kinds = _kinds(module)
        if set(kinds) == {stays}:
            continue
        if len(kinds) > 1 or not _is_called(module) or module is block:
            warnings.warn(
                f"fcdp.shard: {type(module).__name__} inside {type(block).__name__} cannot have a "
                "unit of its own; the block's frozen parameters will cross nodes every step",
                stacklevel=3,
            )
            continue
        groups[next(iter(kinds))].append(module)
    return list(groups.values())


def _fit_in_a_slice(
    separate: Mapping[nn.Module, Sequence[Sequence[nn.Module]]], topology: Topology
) -> bool:
    """Whether all split-off groups take no more memory than 1/L of the largest block."""

    def size(module: nn.Module) -> int:
        return sum(param.numel() * param.itemsize for param in module.parameters())

    kept = sum(size(module) for groups in separate.values() for group in groups for module in group)
    *blocks, _root = separate
    largest = max(map(size, blocks), default=0)
    return kept <= largest / topology.ranks_per_node


def _own_modules(block: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """The block's modules, without those of other units inside it."""
    others = set(blocks) - {block}
    found: list[nn.Module] = []
    pending = [block]
    while pending:
        module = pending.pop(0)
        found.append(module)
        pending[:0] = [child for child in module.children() if child not in others]
    return found


def _kinds(module: nn.Module) -> dict[_Key, int]:
    """Elements that the module itself holds, by kind of parameter."""
    sizes: dict[_Key, int] = defaultdict(int)
    for param in module.parameters(recurse=False):
        sizes[param.dtype, param.requires_grad] += param.numel()
    return dict(sizes)


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
