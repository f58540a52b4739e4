"""FSDP2's private names that FCDP relies on; no other file uses one.

A torch without one of them is refused when the library is imported; what differs between releases
is chosen then, once. ``python -m fcdp.check`` shows whether FSDP2 also does what FCDP expects.
Attributes that a gather needs are read by ``attrgetter``, which is as fast as the name itself.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fcdp.counts import in_backward
from fcdp.extensions import is_extended

#: The oldest and the newest release of torch that the tests run on: results/versions.
OLDEST, NEWEST = (2, 11), (2, 15)
_TESTED = "torch {}.{} to {}.{}".format(*OLDEST, *NEWEST)


def warn_of_newer(version: str) -> None:
    """Warn of a release of torch that the tests have not run on, as there was none yet."""
    if tuple(map(int, version.split(".")[:2])) > NEWEST:
        warnings.warn(
            f"torch {version} is newer than FCDP is tested with ({_TESTED}); "
            "python -m fcdp.check shows in seconds whether FCDP works with it",
            stacklevel=2,
        )


def _refusal(problem: object) -> ImportError:
    return ImportError(
        f"torch {torch.__version__}: {problem}; FCDP relies on it, and is tested with {_TESTED}"
    )


warn_of_newer(torch.__version__)

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


def _has(kind: type, name: str) -> bool:
    """Whether a class or its set-up gives its instances an attribute."""
    there = {*dir(kind), *getattr(kind, "__annotations__", ())}
    for made in (vars(kind).get("__init__"), vars(kind).get("init")):
        there.update(getattr(getattr(made, "__code__", None), "co_names", ()))
    return name in there


def _of(kind: type, *names: str) -> attrgetter[Any]:
    """Return a getter of an instance's attributes, which its class or its set-up must have."""
    for name in names:
        if not _has(kind, name):
            raise _refusal(f"FSDP2's {kind.__name__} has no {name}")
    return attrgetter(*names)


_of(FSDPModule, "_get_fsdp_state")
_of(FSDPState, "_state_ctx", "_training_state", "_modules")
_of(FSDPStateContext, "iter_forward_root")

#: A list since torch 2.12, as a module may have a group per mesh; one or ``None`` before.
_groups = _of(
    FSDPState,
    "_fsdp_param_groups" if _has(FSDPState, "_fsdp_param_groups") else "_fsdp_param_group",
)
#: Since torch 2.13 a user may drop a failed pass, and choose how many reductions are under way.
if _RESETS := hasattr(FSDPModule, "reset_iter_state"):
    _of(FSDPState, "_reset_iter_state")
if _COUNTS_BUFFERS := hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
    _of(FSDPParamGroup, "reduce_scatter_max_input_buffers")
#: Before torch 2.15 FSDP2 keeps the sum of gradients that it has not reduced apart from ``.grad``.
_SUM_APART = not isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
#: Since torch 2.15 ``reduce_dtype=None`` follows ``grad_dtype`` of the parameters, which is their
#: own dtype unless a user sets another; before, it was the dtype that they are gathered in.
_FOLLOWS_GRAD_DTYPE = _has(FSDPParam, "unsharded_grad_dtype")


def state(module: FSDPModule) -> Any:
    """The state of a module: one for all of ``fully_shard([a, b])``."""
    return module._get_fsdp_state()


def param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of a module: one, or none, but with several meshes."""
    groups = _groups(state(module))
    if isinstance(groups, list):
        return [*groups]
    return [] if groups is None else [groups]


#: The beginning of the names by which a module has its state.
STATE_NAMES = "__composable_api_state_key"
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


@contextmanager
def refusing_forwards(module: FSDPModule, refuse: Callable[..., None]) -> Iterator[None]:
    """Call a function that raises whenever the module's forward or a registered method is called.

    Before FSDP2 or anybody else has noted that one begins.
    """
    own = state(module)
    before = vars(own).get("_pre_forward")
    own._pre_forward = refuse
    try:
        with module.register_forward_pre_hook(refuse, prepend=True):  # type: ignore[attr-defined]
            yield
    finally:
        del own._pre_forward
        if before is not None:
            own._pre_forward = before


#: A group's parameters, in the order of its gather.
_params = _of(FSDPParamGroup, "fsdp_params")
#: The mesh of its gathers: ``mesh``, ``shard_mesh_dim``, ``replicate_mesh_dim`` and
#: ``shard_process_group``; and of those in backward: the same, or ``None``, unless it is smaller.
meshes = _of(FSDPParamGroup, "mesh_info", "post_forward_mesh_info")


def shard_mesh(group: Any) -> DeviceMesh:
    """The 1-D mesh that a group is sharded over; another dimension may have its replicas."""
    info, _ = meshes(group)
    mesh: DeviceMesh = info.mesh
    names = mesh.mesh_dim_names
    return mesh if names is None or mesh.ndim == 1 else mesh[names[info.shard_mesh_dim]]


#: Whether backward gathers again.
gathers_in_backward = _of(FSDPParamGroup, "_reshard_after_forward")
#: Collectives that gather the group and reduce it.
collectives = _of(FSDPParamGroup, "_all_gather_comm", "_reduce_scatter_comm")
#: The hook of ``set_all_reduce_hook``; else ``None``.
reduce_hook = _of(FSDPParamGroup, "_all_reduce_hook")
#: A gather that has begun and that nobody has waited for; else ``None``.
prefetched = _of(FSDPParamGroup, "_all_gather_result")
#: The DTensor that the optimizer sees, which a load may replace.
_sharded = _of(FSDPParam, "sharded_param")
#: This rank's part of the gather, flat and padded, and the policy with its dtype. FSDP2 keeps the
#: tensor of the one for as long as the parameter lies there.
_shard = _of(FSDPParam, "_sharded_param_data", "mp_policy")
#: Tensors that a parameter sends of this rank, as a gather extension makes them if there is one.
_inputs = _of(FSDPParam, "all_gather_inputs")
# A gradient is reduced from ``.grad`` of the first, which is there once the parameter has been
# gathered, or from the sum of several that FSDP2 has not reduced.
_of(FSDPParam, "_unsharded_param", "unsharded_accumulated_grad")
_of(FSDPParam, "reset_sharded_param")
# Called on the group: to begin a gather, and when backward has its gradients, to reduce them.
_of(FSDPParamGroup, "unshard", "post_backward")


def sharded_params(group: Any) -> list[Any]:
    return [*map(_sharded, _params(group))]


def _surround(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Call functions before an object's method, and after it unless it raises."""
    plain = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> None:
        if before is not None:
            before()
        plain(*args, **kwargs)
        if after is not None:
            after()

    setattr(owner, name, method)


def around_replaced(group: Any, before: Callable[[], None], after: Callable[[bool], None]) -> None:
    """Call functions before parameters' tensors may become others, and after each of them may.

    FSDP2 reshards a module before ``Module._apply``, and looks at each parameter after it and after
    a load into its module: ``after`` gets whether it lies in other memory now. Counts of writes
    begin anew with a new tensor, and may come to the same sum.
    """

    def begin() -> None:
        if by_hand(group):
            before()

    def look(param: Any, plain: Callable[[], None]) -> None:
        data, _ = _shard(param)
        plain()
        after(_shard(param)[0] is not data and data.numel() > 0)

    _surround(group, "reshard", before=begin)
    for param in _params(group):
        param.reset_sharded_param = functools.partial(look, param, param.reset_sharded_param)


def shards(group: Any) -> list[tuple[torch.Tensor, torch.dtype]]:
    """This rank's parts of the gather, and the dtypes that they are gathered in."""
    return [
        (data, (policy.param_dtype or data.dtype) if data.is_floating_point() else data.dtype)
        for data, policy in map(_shard, _params(group))
    ]


@torch.no_grad()
def extension_bytes(group: Any) -> dict[int, int]:
    """Bytes that each parameter with a gather extension sends of this rank, by its place.

    It reshards a group with one that is gathered: an extension is asked of shards alone. Every rank
    calls it: an extension may exchange what it scales by.
    """
    params = enumerate(_params(group))
    extended = {at: param for at, param in params if is_extended(_sharded(param)._local_tensor)}
    if extended and group.is_unsharded:
        group.reshard()
    return {at: sum(each.nbytes for each in _inputs(param)) for at, param in extended.items()}


def reduce_dtype(group: Any) -> torch.dtype | None:
    """The dtype that a group's gradients are reduced in; ``None`` where none is trained.

    It is the widest where parameters differ: a pass that gives the widest no gradient has another.
    """
    dtypes = [
        param.mp_policy.reduce_dtype
        or (param.sharded_param.grad_dtype if _FOLLOWS_GRAD_DTYPE else None)
        or param.mp_policy.param_dtype
        or param.sharded_param.dtype
        for param in _params(group)
        if param.sharded_param.requires_grad
    ]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def allow_two_reductions(module: FSDPModule, group: Any) -> None:
    """Let a group's reduction be under way while another one's is, unless a user chose a number.

    FSDP2's default makes backward wait for the reduction of the unit before, which crosses nodes.
    One more buffer makes backward wait for the one before that. No torch before 2.13 can do so.
    """
    if _COUNTS_BUFFERS and group.reduce_scatter_max_input_buffers == 1:
        module.set_reduce_scatter_max_input_buffers(2, recurse=False)


def set_collectives(group: Any, gather: AllGather, reduction: ReduceScatter) -> None:
    """Have a group gather and reduce by these; a module may have several groups, one per mesh."""
    group._all_gather_comm, group._reduce_scatter_comm = gather, reduction


_of(FSDPParamGroup, "force_sum_reduction_for_comms")


def force_sums(group: Any) -> None:
    """Have FSDP2 ask a group's reductions for sums, and divide by itself."""
    group.force_sum_reduction_for_comms = True


def is_default(collective: object) -> bool:
    return type(collective) in (DefaultAllGather, DefaultReduceScatter)


def around_gathers(
    group: Any,
    *,
    before: Callable[[], None],
    asked_for: Callable[[], None],
    resharded: Callable[[], None],
) -> None:
    """Call functions around a group's gathers, be they by hand or by its forward or backward.

    ``before`` when one is asked for: FSDP2 then turns gradients off. ``asked_for`` if it began, or
    had begun. ``resharded`` when the group was to reshard, whether ``reshard_after_forward`` has it
    stay gathered or not.
    """
    _surround(group, "unshard", before=before, after=asked_for)
    _surround(group, "reshard", after=resharded)


def make_ordinary_tensors(group: Any) -> None:
    """Have a group's first gather make tensors for all later ones, under any mode.

    Those that ``torch.inference_mode()`` makes can be written to by no pass outside of it, and
    within it not where a parameter is sharded along another dimension than the first.
    """
    plain = group.wait_for_unshard

    def wait_for_unshard() -> None:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                plain()
        else:
            plain()

    group.wait_for_unshard = wait_for_unshard


def forget_gather(group: Any) -> None:
    """Make FSDP2 forget the gather that has begun, so that it begins another."""
    group._all_gather_result = None


def _whole(param: Any) -> torch.Tensor | None:
    """The gathered parameter, resharded or not; ``None`` before its first gather."""
    whole: torch.Tensor | None = getattr(param, "_unsharded_param", None)
    return whole


def wholes(group: Any) -> list[torch.Tensor]:
    """A group's gathered parameters, resharded or not, of which there are none at first."""
    return [whole for param in _params(group) if (whole := _whole(param)) is not None]


def part_sizes(group: Any) -> dict[Any, int]:
    """Elements of this rank's part of each parameter and of its gradient, padding included."""
    return {param: _shard(param)[0].numel() for param in _params(group)}


def with_gradients(group: Any) -> set[Any]:
    """Return the parameters whose gradients FSDP2 is going to reduce."""
    return {
        param
        for param in _params(group)
        if param.unsharded_accumulated_grad is not None
        or ((whole := _whole(param)) is not None and whole.grad is not None)
    }


def give_zeros(param: Any) -> None:
    """Give a parameter without a gradient zeros, which FSDP2 reduces."""
    whole = _whole(param)
    assert whole is not None, "a gather precedes each backward"
    whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)


def drop_gradients(group: Any) -> None:
    """Forget gradients of whole parameters, which FSDP2 would add to the next ones."""
    for param in _params(group):
        if _SUM_APART:
            param.unsharded_accumulated_grad = None
        if (whole := _whole(param)) is not None:
            whole.grad = None


def after_reset(module: FSDPModule, then: Callable[[], None]) -> None:
    """Call a function when ``reset_iter_state`` has dropped a failed pass."""
    if _RESETS:
        _surround(state(module), "_reset_iter_state", after=then)


@contextmanager
def around_reductions(
    group: Any, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """In the body, call functions before FSDP2 looks for gradients and after it has reduced."""
    _surround(group, "post_backward", before=before, after=after)
    try:
        yield
    finally:
        del group.post_backward


_around_passes = _of(FSDPParamGroup, "pre_forward", "post_forward", "pre_backward")
_of(FSDPParamGroup, "lazy_init", "wait_for_unshard", "reshard", "is_unsharded")
_of(FSDPParamGroup, "use_training_state", "_training_state", "comm_ctx")
_of(FSDPState, "_pre_forward_hook_handle", "_post_forward_hook_handle", "_modules_to_run_forward")


def gather_with(module: Any, owners: Sequence[Any]) -> None:
    """Gather a module's group with the groups of its owners, and not when the module is called.

    The group is there from the first owner's forward to the last one's and for the backward of
    each, whoever reads its parameters; its gradients are reduced after the first owner's backward.
    """
    own = state(module)
    own._pre_forward_hook_handle.remove()
    own._post_forward_hook_handle.remove()
    # As of a module that FSDP2 does not shard: its registered methods look these up.
    own._pre_forward = lambda module, args, kwargs: (args, kwargs)
    own._post_forward = lambda module, args, output: output
    (group,) = param_groups(module)
    others = [each for owner in owners for each in param_groups(owner)]
    for other in others:
        _join(group, other, running=own._modules_to_run_forward, others=others)
    _, complete, _ = _around_passes(group)

    def post_forward(module: Any, args: Any, output: Any) -> Any:
        # FSDP2 ends a forward that only some of the owners ran in. The others may run later, and
        # read the module's parameters then.
        return output if any(map(_is_gathered, others)) else complete(module, args, output)

    group.post_forward = post_forward


def _is_gathered(group: Any) -> bool:
    return group.is_unsharded or group._all_gather_result is not None


def _join(group: Any, other: Any, *, running: set[Any], others: Sequence[Any]) -> None:
    """Join a group to one of ``others``; the forwards of those ``running`` have not ended."""

    def follow(name: str) -> None:
        # After backward it is resharded when its own gradients are reduced.
        if other._training_state == TrainingState.POST_BACKWARD:
            return
        if name == "reshard" and any(map(_is_gathered, others)):
            return  # it is read until the last of them is resharded
        group.comm_ctx = other.comm_ctx  # of a module that has left the model, too
        with group.use_training_state(other._training_state):
            getattr(group, name)()

    for name in ("lazy_init", "unshard", "wait_for_unshard", "reshard"):
        _surround(other, name, after=functools.partial(follow, name))
    pre_forward, post_forward, pre_backward = _around_passes(other)

    def begin(module: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pre_forward(module, args, kwargs)
        # The first owner's forward has registered where backward ends. A forward that is repeated
        # in backward would register a place too early; where none has, the end of the pass does it.
        if running or in_backward():
            return args, kwargs
        running.update(others)
        return group.pre_forward(module, args, kwargs)

    def end(module: Any, args: Any, output: Any) -> Any:
        output = post_forward(module, args, output)
        running.discard(other)
        group._training_state = TrainingState.IDLE
        return output

    def begin_backward(default_prefetch: bool, *unused: Any) -> None:
        pre_backward(default_prefetch)
        group.pre_backward(False)  # it is prefetched with the other

    other.pre_forward, other.post_forward, other.pre_backward = begin, end, begin_backward


_of(FSDPState, "_lazy_init", "_states_to_forward_prefetch", "_states_to_backward_prefetch")


class _Ahead(list[Any]):
    """States that a forward gathers ahead: none where a part of the model is called by itself."""

    def __init__(self, own: Any, whole: Any) -> None:
        self._own, self._whole = own, whole

    def __iter__(self) -> Iterator[Any]:
        own = self._own
        alone = own is not self._whole and own._state_ctx.iter_forward_root is own
        return iter(()) if alone else super().__iter__()


def prefetching(module: FSDPModule, model: FSDPModule) -> Callable[[Iterable[FSDPModule]], None]:
    """Have a module of a model gather nothing ahead yet; return what adds modules to that.

    Where ``set_modules_to_forward_prefetch`` is called meanwhile, the user's modules stay.
    """
    own = state(module)
    own._states_to_forward_prefetch = ahead = _Ahead(own, state(model))
    return lambda coming: ahead.extend(map(state, coming))


class _NothingAhead(list[Any]):
    """No states that a backward gathers ahead: nor does FSDP2 choose any while it is not empty."""

    def __init__(self, lasts: Callable[[], bool]) -> None:
        self._lasts = lasts

    def __len__(self) -> int:
        return int(self._lasts())


def prefetch_nothing(module: FSDPModule, while_true: Callable[[], bool]) -> None:
    """Have a module's backward gather nothing ahead for as long, unless a user has said what."""
    own = state(module)
    if not own._states_to_backward_prefetch:
        own._states_to_backward_prefetch = _NothingAhead(while_true)


def before_first_forward(module: FSDPModule, then: Callable[[], None]) -> None:
    """Call a function once, before FSDP2 finds the modules of a root: at its first forward."""
    own = state(module)

    def once() -> None:
        del own._lazy_init
        then()

    _surround(own, "_lazy_init", before=once)


def leave_open(module: FSDPModule) -> None:
    """Mark resharding as not set by the user, which ``set_reshard_after_forward`` undoes."""
    state(module)._auto_reshard_after_forward = True


def by_hand(group: Any) -> bool:
    """Whether a caller has asked for ``unshard()`` or ``reshard()``, and no forward or backward."""
    return bool(group._training_state == TrainingState.IDLE)
