"""The public functions."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fcdp.agreement import on_all_ranks
from fcdp.arguments import (
    blocks_of,
    check_fsdp2_policies,
    check_kinds,
    check_plain,
    policy_of,
    warn_without_blocks,
)
from fcdp.cache.cache import Safety
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.cache.tiers import disk
from fcdp.codec import Codec, Codecs, Delta
from fcdp.engine import Engine, engine_of, has_engine, is_set_up
from fcdp.ledger import Ledger
from fcdp.partial_gradients import PartialsPlace
from fcdp.partition import (
    Split,
    bucket,
    fit_in_a_slice,
    placement,
    set_trained_apart,
    split_off,
)
from fcdp.setup import Options, Setup
from fcdp.topology import Topology

#: Where trained parameters of a mostly frozen model live: a part on every rank, or whole on each.
Adapters = Literal["sharded", "replicated"]

#: Blocks whose gathers are under way on the CPU while one computes. The second crosses nodes while
#: the first is spread inside the node, which the thread that issues gathers waits for.
BLOCKS_AHEAD = 2


def shard(
    model: nn.Module,
    topology: Topology,
    *,
    units: Iterable[nn.Module] | None = None,
    policy: CachePolicy | str = HostCache(),
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward: bool | None = None,
    look_ahead: int = 1,
    partial_gradients: PartialsPlace = "device",
    detect_writes: bool = True,
    verify: bool = False,
    poison: bool = False,
    gather_codec: Codec | Delta | None = None,
    reduce_codec: Codec | None = None,
    error_feedback: bool = False,
    adapters: Adapters = "sharded",
) -> nn.Module:
    """Shard ``model`` with FSDP2 and cache its gathered parameters, in place.

    ``units`` are the modules to gather one at a time: by default the model's blocks, which are the
    members of its largest list of modules, whatever is wrapped around it. Inside each, parameters
    that differ in dtype or in ``requires_grad`` get units of their own: the adapters of a block
    gather together, apart from its frozen weights (paper: FCDP-Comm). Freeze and add adapters
    before. Make the optimizer after: one made before holds parameters that are the model's
    no longer, and its step is a ``RuntimeError``.

    ``policy`` says where entries wait: a :class:`CachePolicy`, or its name as matrix files write it
    (``"host"``, ``"budget(device=1 GiB, host=4 GiB)"``). Rank 0 prints where all units lie.

    Matrices of fewer rows than ranks, as low-rank factors are, are sharded along a dimension that
    the ranks divide evenly, if there is one: by rows, most of what is gathered would be padding.

    ``mp_policy``, ``offload_policy`` and ``reshard_after_forward`` mean what they mean to
    ``fully_shard``. By default adapters stay gathered from forward to backward, and those of many
    blocks share a unit of up to 25 MiB, if all of them together are no larger than the slice of one
    block that a rank gathers across nodes. ``look_ahead`` and what follows it mean what they mean
    to :func:`cache_parameters`.

    ``adapters="replicated"`` keeps trained parameters that have a unit of their own whole on every
    rank instead, as plain tensors in their own dtype, and averages their gradients by one
    all-reduce at the end of each backward (``reduce_codec`` does not apply to them). That sends the
    same bytes in one exchange instead of two, for the memory of whole adapters, gradients and
    optimizer states a rank. They start as rank 0's; load or write them on all ranks alike.
    ``clip_grad_norm_`` takes them together with sharded parameters only group by group.

    Parameters may be DTensors of tensor parallelism, over another dimension of the mesh that
    ``topology`` is of (:meth:`Topology.of_mesh`); replicated adapters may not.

    Setting up again with equal arguments changes nothing.

    Raises ``ValueError`` for a model that is sharded already, DTensors of any other mesh, a unit
    outside the model, no units where the model's blocks cannot be told (it lists what they may be),
    too little host memory, or ``adapters="replicated"`` where nothing trained
    has a unit of its own.
    """
    # Before anything is sharded, what can be refused by then.
    check_kinds(model, topology)
    check_fsdp2_policies(mp_policy, offload_policy)
    policy = policy_of(policy)
    options = Options(
        look_ahead,
        partial_gradients,
        Safety(detect_writes, verify, poison),
        Codecs(gather_codec, reduce_codec, error_feedback),
    )
    blocks = blocks_of(model, units)
    sharding = (tuple(map(id, blocks)), mp_policy, offload_policy, reshard_after_forward, adapters)
    setup = Setup(_ranks(topology), policy, options, sharding)
    if is_set_up(model, setup):
        return model
    if adapters not in get_args(Adapters):
        raise ValueError(f"adapters = {adapters!r}: must be one of {', '.join(get_args(Adapters))}")
    if not isinstance(reshard_after_forward, bool | None):
        raise ValueError(
            f"reshard_after_forward = {reshard_after_forward!r}: must be True, False or None; what "
            "an integer does in FSDP2 (hpZ), fcdp.DeviceCache() does here"
        )
    check_plain(model, topology)
    warn_without_blocks(blocks, topology)
    on_all_ranks(f"policy = {policy}", topology, lambda: _check_directory(policy))
    splits = split_off(model, blocks)
    replicated: list[nn.Parameter] = []
    if adapters == "replicated":
        splits, replicated = set_trained_apart(splits)
        if not replicated:
            raise ValueError(
                "adapters = 'replicated': no trained parameter is apart from frozen ones; freeze "
                "the base model first, or use 'sharded'"
            )
    keep = reshard_after_forward is None and fit_in_a_slice(splits, blocks, topology.ranks_per_node)
    if keep:
        splits = bucket(splits, model)
    before = [*map(weakref.ref, model.parameters())]  # alive, they would take memory twice
    groups = [(split.modules, False if keep else reshard_after_forward) for split in splits]
    groups += [([block], reshard_after_forward) for block in [*blocks, model]]
    for modules, reshard in groups:
        fully_shard(
            modules,
            mesh=topology.mesh,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            reshard_after_forward=reshard,
            ignored_params=set(replicated),
            shard_placement_fn=functools.partial(placement, world_size=topology.world_size),
        )
    if topology.mesh.device_type == "cpu":
        _prefetch_forward(model, blocks, splits)
    Engine(
        model,
        topology,
        setup,
        replicated=replicated,
        before=before,
        kept=[module for split in splits for module in split.modules] if keep else [],
        reduce_dtype=mp_policy.reduce_dtype,
    )
    return model


def cache_parameters(
    model: nn.Module,
    topology: Topology,
    policy: CachePolicy | str = HostCache(),
    *,
    look_ahead: int = 1,
    partial_gradients: PartialsPlace = "device",
    detect_writes: bool = True,
    verify: bool = False,
    poison: bool = False,
    gather_codec: Codec | Delta | None = None,
    reduce_codec: Codec | None = None,
    error_feedback: bool = False,
) -> nn.Module:
    """Cache the gathered parameters of a model that ``fully_shard`` has already sharded.

    The model must be sharded over ``topology.mesh`` or a 1-D mesh over the same ranks. Collective:
    every rank calls it.

    ``look_ahead`` is how many entries are fetched from host memory (on CUDA) or disk ahead of their
    gathers, each into device memory of one unit's slice. ``partial_gradients`` is where the sums of
    :func:`accumulate` wait: in device memory, or in an arena of the host, at a copy in and out per
    unit and micro-batch.

    ``detect_writes`` compares checksums of this rank's own shards, so that parameters written where
    nothing shows it (see :func:`invalidate`) are never used silently: on the CPU before each pass,
    which then gathers them anew; everywhere at each gather from the cache, without waiting for the
    device, as a ``RuntimeError`` on all ranks at most two passes later. ``verify`` checks that
    every entry is read as it was written and that all ranks count the same generations, and stops
    with a ``RuntimeError`` that names unit, rank and generation; it costs a pass over each entry
    and, on an accelerator, the overlap. ``poison`` fills stale entries with NaN, for tests.

    ``gather_codec`` and ``reduce_codec`` (:class:`fcdp.BlockInt8`, :class:`fcdp.BlockInt4`) encode
    what crosses nodes, in gathers of parameters and in reductions of gradients; what stays inside
    a node, and so a run on one node, is exact. They are lossy: training no longer follows FSDP2 bit
    for bit. Gathered weights are rounded, alike on all nodes and whether they come from the
    cache or not; the sharded ones that the optimizer steps, and checkpoints, are not. Gradients are
    rounded once, and added up in fp32 or wider. ``error_feedback`` adds what the last reduction's
    rounding lost to the next, for (n−1)/n of 1/L of the gradients in fp32 a rank, which no
    checkpoint keeps and ``load_state_dict`` drops; with a loss scale that changes it is wrong by
    the change, once.

    Setting up again with equal arguments changes nothing.

    Raises ``ValueError`` for a model not sharded by FSDP2, sharded over several dimensions, or
    set up already with other arguments, for a negative ``look_ahead``, for too little host memory,
    for a ``gather_codec`` where one unit's parameters are not of one floating dtype, and for
    ``error_feedback`` without a ``reduce_codec``.
    """
    check_kinds(model, topology)
    options = Options(
        look_ahead,
        partial_gradients,
        Safety(detect_writes, verify, poison),
        Codecs(gather_codec, reduce_codec, error_feedback),
    )
    setup = Setup(_ranks(topology), policy_of(policy), options)
    if not is_set_up(model, setup):
        Engine(model, topology, setup)
    return model


def is_cached(model: nn.Module) -> bool:
    """Whether FCDP is set up on ``model`` or on a part of it."""
    return has_engine(model)


def accumulate(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Run one micro-batch's forward and backward of several between two optimizer steps.

    With ``last=False`` gradients are summed inside the node only, and ``.grad`` stays zero; with
    ``last=True`` the sums cross nodes once, and ``.grad`` holds the total, of units too that only
    earlier micro-batches have used. The waiting sums take 1/L of the model's gradients per rank, in
    fp32.

    A step that is given up takes its sums along: by an exception inside, by :func:`discard`, or
    where ``zero_grad()`` has set the gradients to ``None``.

    Raises ``RuntimeError`` with ``last=False`` for post-accumulate-gradient hooks on sharded
    parameters, which would see zeros, and where ``.grad`` was written in place since the last
    micro-batch, as ``zero_grad(set_to_none=False)`` does (an optimizer with ``foreach=True`` does
    it unseen: call :func:`discard`).
    """
    return engine_of(model).accumulating(last=last)


def discard(model: nn.Module) -> None:
    """Give up the step whose micro-batches :func:`accumulate` has run so far.

    Forgets the gradients that wait to cross nodes. Call it with ``optimizer.zero_grad()``, on every
    rank. Harmless where nothing waits.
    """
    engine_of(model).discard()


def invalidate(model: nn.Module) -> None:
    """Declare the parameters written, after a write that PyTorch does not show.

    Such are writes through ``param.data``, ``param.detach()`` or a raw pointer, and
    ``torch._foreach_*`` on parameters outside of an optimizer, as averages of weights and merged
    adapters use them. Optimizer steps, ``load_state_dict``, checkpoints loaded into a
    ``state_dict`` and in-place operations on parameters are seen without it. Every rank calls it.

    Without it, ``detect_writes`` sees such a write: in time on the CPU; on an accelerator when
    results are wrong already, as an error.
    """
    engine_of(model).staleness.invalidate()


def ledger(model: nn.Module) -> Ledger:
    """Bytes that this rank moved, by link and phase."""
    return engine_of(model).ledger


def _ranks(topology: Topology) -> tuple[int, int]:
    return topology.nodes, topology.ranks_per_node


def _check_directory(policy: CachePolicy) -> None:
    if policy.directory is not None:
        disk.check_directory(policy.directory)


def _prefetch_forward(
    model: nn.Module, blocks: Sequence[nn.Module], splits: Sequence[Split]
) -> None:
    """Start the gathers of blocks and of their adapters while the blocks before them compute.

    Where one thread both computes and issues gathers (gloo), nothing overlaps unless it is issued
    early. On CUDA the host runs ahead by itself.
    """
    order = [model, *blocks]
    for index, module in enumerate(order):
        assert isinstance(module, FSDPModule)
        called = [
            unit
            for block in order[index + 1 :][:BLOCKS_AHEAD]
            for unit in (block, *(split.modules[0] for split in splits if split.block is block))
        ]
        module.set_modules_to_forward_prefetch(
            [unit for unit in called if isinstance(unit, FSDPModule)]
        )
