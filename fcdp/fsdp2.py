"""FSDP2's private names that FCDP relies on; no other file uses one.

A torch without one of them is refused when the library is imported. Attributes that a gather needs
are read by ``attrgetter``, which is as fast as the name itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

#: The torch that the tests run on, and the oldest that there may be.
TESTED = "2.13"


def _refusal(problem: object) -> ImportError:
    return ImportError(
        f"torch {torch.__version__}: {problem}; FCDP relies on it, and is tested with {TESTED}"
    )


try:
    # The protocols of custom collectives, and what a module gathers and reduces by without them.
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllocMixin as DefaultAllocMixin,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
except ImportError as error:
    raise _refusal(error.msg) from error


def _of(kind: type, *names: str) -> attrgetter[Any]:
    """Return a getter of an instance's attributes, which its class or its set-up must have."""
    there = {*dir(kind), *getattr(kind, "__annotations__", ())}
    for made in (vars(kind).get("__init__"), vars(kind).get("init")):
        there.update(getattr(getattr(made, "__code__", None), "co_names", ()))
    for name in names:
        if name not in there:
            raise _refusal(f"FSDP2's {kind.__name__} has no {name}")
    return attrgetter(*names)


_of(FSDPModule, "_get_fsdp_state")
_of(FSDPState, "_state_ctx", "_fsdp_param_groups", "_training_state", "_modules")
_of(FSDPState, "_reset_iter_state")
_of(FSDPStateContext, "iter_forward_root")


def state(module: FSDPModule) -> Any:
    """The state of a module: one for all of ``fully_shard([a, b])``."""
    return module._get_fsdp_state()


def param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of a module: one, or none, but with several meshes."""
    return [*state(module)._fsdp_param_groups]


#: Whether FSDP2 keeps what a state's module holds itself gathered after forward, as a root.
keeps_root = _of(FSDPState, "_auto_reshard_after_forward")


def outermost(module: FSDPModule) -> Any:
    """The state whose forward is the outermost that runs around the module; else ``None``."""
    return state(module)._state_ctx.iter_forward_root


#: Functions that FSDP2 calls before and after a module's forward, or a registered method of it.
_around_forward = _of(FSDPState, "_pre_forward", "_post_forward")


def when_forward_ends(state: Any, then: Callable[[], None]) -> None:
    """Call a function when the forward under way of a module, or its forward method, has ended.

    FSDP2 hooks a module's forward, and wraps a registered method so that it looks
    ``_post_forward`` up when it ends. A method that raises does not get there: the next one that
    begins ends it, begins as a root's does, and waits for writes.
    """
    begin, plain = _around_forward(state)

    def close(*_: Any) -> None:
        handle.remove()
        for name in ("_pre_forward", "_post_forward"):
            vars(state).pop(name, None)
        then()

    def pre_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        close()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        return begin(module, args, kwargs)

    def post_forward(module: torch.nn.Module, args: Any, output: Any) -> Any:
        result = plain(module, args, output)
        close()
        return result

    handle = state._modules[0].register_forward_hook(close, always_call=True)
    # Decisions that are no part of a graph.
    state._pre_forward = torch.compiler.disable(pre_forward)
    state._post_forward = torch.compiler.disable(post_forward)


#: A group's parameters, in the order of its gather.
_params = _of(FSDPParamGroup, "fsdp_params")
#: The mesh of its gathers: ``mesh``, ``shard_mesh_dim``, ``replicate_mesh_dim`` and
#: ``shard_process_group``; and of those in backward: the same, or ``None``, unless it is smaller.
meshes = _of(FSDPParamGroup, "mesh_info", "post_forward_mesh_info")
#: Whether backward gathers again.
gathers_in_backward = _of(FSDPParamGroup, "_reshard_after_forward")
#: Collectives that gather the group and reduce it.
collectives = _of(FSDPParamGroup, "_all_gather_comm", "_reduce_scatter_comm")
#: How many reductions of groups may be under way before the next waits for one of them.
reduce_buffers = _of(FSDPParamGroup, "reduce_scatter_max_input_buffers")
#: The hook of ``set_all_reduce_hook``; else ``None``.
reduce_hook = _of(FSDPParamGroup, "_all_reduce_hook")
#: A gather that has begun and that nobody has waited for; else ``None``.
prefetched = _of(FSDPParamGroup, "_all_gather_result")
#: The DTensor that the optimizer sees, which a load may replace.
_sharded = _of(FSDPParam, "sharded_param")
#: This rank's part of the gather, flat and padded, and the policy with its dtype.
_shard = _of(FSDPParam, "_sharded_param_data", "mp_policy")
# A gradient is reduced from the second, in the reduce dtype, or from ``.grad`` of the first, which
# is there once the parameter has been gathered. ``unsharded_param`` is the same, while it is.
_of(FSDPParam, "reset_sharded_param")
_of(FSDPParam, "_unsharded_param", "unsharded_accumulated_grad", "unsharded_param")
# Called on the group: to begin a gather, and when backward has its gradients, to reduce them.
_of(FSDPParamGroup, "unshard", "post_backward")


def sharded_params(group: Any) -> list[Any]:
    return [*map(_sharded, _params(group))]


def writes(group: Any) -> int:
    """Count the in-place writes to this rank's parts that autograd sees."""
    count = 0
    for of_group in group.fsdp_params:  # a gather asks: no list, no generator
        param = of_group.sharded_param
        count += param._version + param._local_tensor._version
    return count


def _surround(
    owner: Any,
    name: str,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Have functions called before an object's method and after it, unless it raises."""
    plain = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> None:
        if before is not None:
            before()
        plain(*args, **kwargs)
        if after is not None:
            after()

    setattr(owner, name, method)


def after_replaced(group: Any, then: Callable[[], None]) -> None:
    """Call a function when a parameter's tensor may be another, or hold what was loaded.

    FSDP2 looks at each parameter after ``Module._apply`` and after a load into its module. Counts
    of writes begin anew with a new tensor, and may come to the same sum.
    """
    for param in _params(group):
        _surround(param, "reset_sharded_param", after=then)


def shards(group: Any) -> list[tuple[torch.Tensor, torch.dtype]]:
    """This rank's parts of the gather, and the dtypes that they are gathered in."""
    return [
        (data, (policy.param_dtype or data.dtype) if data.is_floating_point() else data.dtype)
        for data, policy in map(_shard, _params(group))
    ]


def is_default(collective: object) -> bool:
    return type(collective) in (DefaultAllGather, DefaultReduceScatter)


def before_gathers(group: Any, before: Callable[[], None]) -> None:
    """Have a function called when a gather is asked for; FSDP2 then turns gradients off."""
    _surround(group, "unshard", before)


def forget_gather(group: Any) -> None:
    """Have FSDP2 gather anew, as if none had begun."""
    group._all_gather_result = None


def with_gradients(group: Any) -> set[Any]:
    """The parameters of which FSDP2 is going to reduce a gradient."""
    return {
        param
        for param in _params(group)
        if param.unsharded_accumulated_grad is not None
        or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
    }


def give_zeros(param: Any) -> None:
    """Have FSDP2 reduce zeros for a parameter that has received no gradient."""
    param.unsharded_accumulated_grad = torch.zeros_like(param.unsharded_param)


def drop_gradients(group: Any) -> None:
    """Forget gradients of whole parameters, which FSDP2 would add to the next ones."""
    for param in _params(group):
        param.unsharded_accumulated_grad = None
        if (whole := getattr(param, "_unsharded_param", None)) is not None:
            whole.grad = None


def after_reset(module: FSDPModule, then: Callable[[], None]) -> None:
    """Call a function when ``reset_iter_state`` has dropped a failed pass."""
    _surround(state(module), "_reset_iter_state", after=then)


@contextmanager
def around_reductions(
    group: Any, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """Have functions called in the body: before FSDP2 looks for gradients, and after it reduced."""
    _surround(group, "post_backward", before, after)
    try:
        yield
    finally:
        del group.post_backward


def leave_open(module: FSDPModule) -> None:
    """Have ``keeps_root`` say, until ``set_reshard_after_forward``, that nobody has set it yet."""
    state(module)._auto_reshard_after_forward = True


#: What a group is gathered for, or reduced.
_phase = _of(FSDPParamGroup, "_training_state")


def by_hand(group: Any) -> bool:
    """Whether a gather that is asked for now is ``unshard()``'s: no forward's, no backward's."""
    return bool(_phase(group) == TrainingState.IDLE)
