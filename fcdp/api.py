"""The public functions."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Sequence

import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fcdp.agreement import check_alike, on_all_ranks
from fcdp.arguments import (
    Setup,
    blocks_of,
    check_kinds,
    check_parts,
    check_plain,
    check_topology,
    load_codecs,
    policy_of,
    warn_of_mixed,
    warn_without_blocks,
)
from fcdp.blocks import prefetch_forward
from fcdp.cache.policy import CachePolicy, HostCache
from fcdp.cache.tiers import check_directory
from fcdp.counts import Ledger
from fcdp.engine import Engine, engine_of, has_engine, is_set_up
from fcdp.extensions import is_extended
from fcdp.fsdp2 import gather_with
from fcdp.options import CacheOptions, CommOptions
from fcdp.partition import bucket, fit_in_a_slice, placement, split_off
from fcdp.topology import Topology


def shard(
    model: nn.Module,
    topology: Topology,
    *,
    units: Iterable[nn.Module | Sequence[nn.Module]] | None = None,
    policy: CachePolicy | str = HostCache(),
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    reshard_after_forward: bool | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    cache: CacheOptions = CacheOptions(),
    comm: CommOptions = CommOptions(),
) -> nn.Module:
    """Shard ``model`` with FSDP2 and cache its gathered parameters, in place. Collective.

    Freeze and add adapters before. Make the optimizer after: one made before holds parameters that
    are the model's no longer, and its step is a ``RuntimeError``. Rank 0 prints where units lie.

    Inside each unit, parameters that differ in dtype or in ``requires_grad`` get units of their
    own: the adapters of a block gather together, apart from its frozen weights (paper: FCDP-Comm).
    Adapters stay gathered from forward to backward, and those of many blocks share a unit of up to
    25 MiB, if all of them together are no larger than the slice of one block that a rank gathers
    across nodes. Matrices of fewer rows than ranks, as low-rank factors are, are sharded along a
    dimension that the ranks divide evenly, if there is one: by rows, most of what is gathered would
    be padding. Setting up again with equal arguments changes nothing.

    Args:
        model: Any module; its parameters, of any shapes and dtypes, become DTensors sharded over
            ``topology.mesh``. They may be DTensors of tensor parallelism over another dimension of
            the mesh that ``topology`` is of (``Topology.of_mesh``).
        topology: Where the ranks stand.
        units: The modules to gather one at a time; by default the model's blocks, which are the
            members of its largest list of modules, whatever is wrapped around it. A list of modules
            among them is one unit, as modules that share a parameter must be.
        policy: Where entries wait: a ``CachePolicy``, or its name as matrix files write it
            (``"host"``, ``"budget(device=1 GiB, host=4 GiB)"``).
        mp_policy: As of ``fully_shard``.
        offload_policy: As of ``fully_shard``.
        reshard_after_forward: As of ``fully_shard``, no integer; ``None`` keeps small adapters.
        ignored_params: As of ``fully_shard``: they stay whole, and are left alone here.
        cache: How entries are fetched and checked.
        comm: What is sent between nodes, and by which exchanges.

    Returns:
        The model itself.

    Raises:
        ValueError: On every rank, where one has a reason: for a model that is sharded already,
            DTensors of any other mesh, a unit outside the model, no units where its blocks are
            ambiguous (it lists candidates), a parameter of no dimension or in two units, an integer
            ``reshard_after_forward``, a model, units, options or a policy's class that differ
            between ranks, and as of ``cache_parameters`` (the model is sharded then).
        RuntimeError: Where another rank has failed otherwise, as for lack of memory, in its words.

    Example:
        >>> model = fcdp.shard(Net(), topology, policy="host")
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> fcdp.ledger(model).misses  # each block crossed nodes once, and none in backward
        2
    """
    check_topology(topology)

    def check() -> tuple[Setup, list[list[nn.Module]], set[nn.Parameter]] | None:
        """Refuse what can be before anything is sharded; return nothing where all is set up."""
        check_kinds(
            model, mp_policy=mp_policy, offload_policy=offload_policy, cache=cache, comm=comm
        )
        blocks, ignored = blocks_of(model, units), {*ignored_params}
        setup = Setup(
            (topology.nodes, topology.ranks_per_node),
            policy_of(policy),
            cache=cache,
            comm=comm,
            sharding={
                "units": tuple(tuple(map(id, block)) for block in blocks),
                "mp_policy": mp_policy,
                "offload_policy": offload_policy,
                "reshard_after_forward": reshard_after_forward,
                "ignored_params": frozenset(map(id, ignored)),
            },
        )
        if is_set_up(model, setup):
            return None
        if not isinstance(reshard_after_forward, bool | None):
            raise ValueError(
                f"reshard_after_forward = {reshard_after_forward!r}: must be True, False or None; "
                "what an integer does in FSDP2 (hpZ), fcdp.DeviceCache() does here"
            )
        check_plain(model, topology, ignored)
        check_parts(model, blocks, ignored)
        return setup, blocks, ignored

    checked = on_all_ranks("fcdp.shard", topology, check)
    if checked is None:
        return model
    setup, blocks, ignored = checked
    policy = setup.policy
    names = {module: name for name, module in model.named_modules()}
    check_alike(
        topology,
        **setup.alike,
        model=[
            (name, [*param.shape], param.dtype, param.requires_grad, is_extended(param))
            for name, param in model.named_parameters()
            if param not in ignored
        ],
        units=[[names[module] for module in block] for block in blocks],
    )
    warn_without_blocks(blocks, topology)
    on_all_ranks(f"policy = {policy}", topology, lambda: check_directory(policy.directory))
    load_codecs(comm, topology)
    splits = on_all_ranks("model", topology, lambda: split_off(model, blocks, ignored))
    keep = reshard_after_forward is None and fit_in_a_slice(splits, blocks, topology.ranks_per_node)
    if keep:
        splits = bucket(splits, model)
    before = [*map(weakref.ref, model.parameters())]  # alive, they would take memory twice
    of_blocks = [split for split in splits if split.blocks != [[model]]]
    to_shards = functools.partial(
        fully_shard,
        mesh=topology.mesh,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        shard_placement_fn=functools.partial(placement, world_size=topology.world_size),
    )
    place = {module: at for at, module in enumerate(model.modules())}

    def shard_units() -> None:
        # Blocks inside of another block come before it, as FSDP2 asks.
        for block in sorted([*blocks, [model]], key=lambda block: place[block[0]], reverse=True):
            to_shards(
                [*block],
                reshard_after_forward=reshard_after_forward,
                # No variable: it would keep whole parameters alive beside their shards.
                ignored_params=ignored.union(*(split.params for split in splits)),
            )
        for split in splits:
            # FSDP2 keeps what the model itself holds: what is split off it, too.
            stays = keep or (reshard_after_forward is None and split.blocks == [[model]])
            reshard = False if stays else reshard_after_forward
            to_shards(split.modules, reshard_after_forward=reshard, ignored_params=split.others)
            split.params.clear()
            gather_with(split.modules[0], [block[0] for block in split.blocks])

    on_all_ranks("fcdp.shard, which needs the model anew", topology, shard_units)
    if topology.mesh.device_type == "cpu":
        prefetch_forward(model, [block[0] for block in blocks])
    Engine(
        model,
        topology,
        setup,
        before=before,
        not_resharded=[module for split in of_blocks if keep for module in split.modules],
    )
    return model


def cache_parameters(
    model: nn.Module,
    topology: Topology,
    policy: CachePolicy | str = HostCache(),
    *,
    cache: CacheOptions = CacheOptions(),
    comm: CommOptions = CommOptions(),
) -> nn.Module:
    """Cache the gathered parameters of a model that ``fully_shard`` has already sharded.

    Collective: every rank calls it. Setting up again with equal arguments changes nothing. Where
    units mix a few trained parameters with frozen ones, rank 0 says what that costs.

    Args:
        model: Sharded over ``topology.mesh``, or over meshes of some of its ranks, as experts are:
            as many on each node that has any. What lies within one node is left to FSDP2. Of a mesh
            of two dimensions (HSDP) the sharded one counts.
        topology: Where the ranks stand, of all meshes together.
        policy: Where entries wait: a ``CachePolicy``, or its name as matrix files write it.
        cache: How entries are fetched and checked.
        comm: What is sent between nodes, and by which exchanges.

    Returns:
        The model itself.

    Raises:
        ValueError: On every rank, for a model not sharded by FSDP2, sharded within nodes alone or
            unevenly over them, or set up already with other arguments, for units, options, a
            policy's class or its tiers of a unit that differ between ranks, for gather extensions
            that return other sizes on other ranks, for too little host memory, for a
            ``gather_codec`` where a unit's parameters are not of one floating dtype, ``Exact`` on
            an accelerator, and either of ``Delta`` and ``Exact`` on the CPU without the packages
            of ``fcdp[differences]``.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = fully_shard(Net(), mesh=topology.mesh)
        >>> fcdp.is_cached(fcdp.cache_parameters(model, topology, "device"))
        True
    """
    check_topology(topology)

    def check() -> Setup | None:
        check_kinds(model, cache=cache, comm=comm)
        shape = topology.nodes, topology.ranks_per_node
        setup = Setup(shape, policy_of(policy), cache=cache, comm=comm)
        return None if is_set_up(model, setup) else setup

    setup = on_all_ranks("fcdp.cache_parameters", topology, check)
    if setup is not None:
        check_alike(topology, **setup.alike)
        load_codecs(comm, topology)
        warn_of_mixed(Engine(model, topology, setup).units, topology)
    return model


def is_cached(model: nn.Module) -> bool:
    """Whether FCDP is set up on ``model`` or on a part of it.

    Args:
        model: Any module, sharded or not.

    Returns:
        ``True`` after ``shard`` or ``cache_parameters`` on it or on one of its modules.

    Example:
        >>> fcdp.is_cached(model), fcdp.is_cached(torch.nn.Linear(8, 8))
        (True, False)
    """
    return has_engine(model)


def accumulate(model: nn.Module, *, last: bool) -> contextlib.AbstractContextManager[None]:
    """Run forward and backward of one of several micro-batches between two optimizer steps.

    With ``last=False`` gradients are summed inside the node only, and reading ``.grad`` is an
    error; with ``last=True`` the sums cross nodes once, and ``.grad`` holds the total, of units too
    that only earlier micro-batches have used. The waiting sums take 1/L of the model's gradients
    per rank, in fp32, with L ranks per node, where ``CommOptions.partial_gradients`` says; with
    ``"each"`` none wait, and ``.grad`` holds the sum so far after each micro-batch.

    Abandoning a step drops its sums: by an exception inside, by ``discard``, or where
    ``zero_grad()`` has set the gradients to ``None`` or zeroed them.

    Args:
        model: A cached model.
        last: Whether the optimizer steps after this micro-batch.

    Returns:
        A context manager around the micro-batch's forward and backward.

    Raises:
        ValueError: For a model that FCDP is not set up on.
        RuntimeError: Inside of another micro-batch's; with ``last=False`` for
            post-accumulate-gradient or all-reduce hooks, which would get no gradient; and where
            ``.grad`` is read or scaled between micro-batches, or set to ``None`` or zeroed for some
            parameters of a unit alone.

    Example:
        >>> for at in range(2):
        ...     with fcdp.accumulate(model, last=at == 1):
        ...         model(torch.ones(1, 8)).sum().backward()
        >>> fcdp.ledger(model).misses  # the second micro-batch finds everything in the cache
        2
    """
    return engine_of(model).accumulating(last=last)


def unchanged(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run forwards between which nobody writes parameters: of generated tokens, or micro-batches.

    The ranks agree once which entries are stale, where each forward has them exchange small
    messages, inside the node and then between nodes, and a GPU's host wait. Optimizer steps and
    loads in the body, on every rank, are seen all the same.

    Args:
        model: A cached model.

    Returns:
        A context manager around the forwards; all ranks must run the same number.

    Raises:
        ValueError: For a model that FCDP is not set up on.
        RuntimeError: In the body for a write in place; for one that autograd does not count, on
            all ranks at most two passes later.

    Example:
        >>> with fcdp.unchanged(model), torch.no_grad():
        ...     tokens = [model(torch.ones(1, 8)) for _ in range(3)]
    """
    return engine_of(model).staleness.unchanged()


def discard(model: nn.Module) -> None:
    """Give up the step whose micro-batches ``accumulate`` has run so far.

    Forgets the gradients that wait to cross nodes. Call it with ``optimizer.zero_grad()``, on every
    rank. Harmless where nothing waits.

    Args:
        model: A cached model.

    Raises:
        ValueError: For a model that FCDP is not set up on.

    Example:
        >>> with fcdp.accumulate(model, last=False):
        ...     model(torch.ones(1, 8)).sum().backward()
        >>> fcdp.discard(model)
        >>> optimizer.zero_grad()
        >>> fcdp.ledger(model).pending_bytes
        0
    """
    engine_of(model).discard()


def invalidate(model: nn.Module) -> None:
    """Declare the parameters written, after a write that PyTorch does not show.

    Such are writes through ``param.data``, ``param.detach()`` or a raw pointer, and
    ``torch._foreach_*`` on parameters outside of an optimizer, as averages of weights and merged
    adapters use them. Optimizer steps, ``load_state_dict``, checkpoints loaded into a
    ``state_dict`` and in-place operations on parameters are seen without it. Every rank calls it.

    Without it, ``CacheOptions.detect_writes`` sees such a write: before a pass on the CPU or
    without gradients; otherwise when results are wrong already, as an error.

    Args:
        model: A cached model.

    Raises:
        ValueError: For a model that FCDP is not set up on.

    Example:
        >>> for parameter in model.parameters():
        ...     _ = parameter.data.mul_(0.5)
        >>> fcdp.invalidate(model)
        >>> model(torch.ones(1, 8)).shape  # of the new values
        torch.Size([1, 8])
    """
    engine_of(model).staleness.invalidate()


def ledger(model: nn.Module) -> Ledger:
    """Bytes that this rank moved since the last ``reset``, by link and phase.

    Args:
        model: A cached model.

    Returns:
        The model's own ledger, which goes on counting.

    Raises:
        ValueError: For a model that FCDP is not set up on.

    Example:
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> counts = fcdp.ledger(model)
        >>> counts.hits, counts.misses  # forward gathered both blocks, backward found them
        (2, 2)
        >>> counts.total("inter_node") > 0
        True
    """
    return engine_of(model).ledger
