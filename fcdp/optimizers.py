"""Calls around each step of every optimizer of the process, whoever made it."""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fcdp import fsdp2
from fcdp.pass_controller import untraced

logger = logging.getLogger("fcdp")


class Follower(Protocol):
    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; its closure, if any, has computed gradients."""

    def after_step(self, optimizer: Optimizer) -> None: ...


class StaleOptimizers:
    """Optimizers that would step parameters which are the model's no longer, and train nothing.

    ``fully_shard`` puts new parameters in the place of the old ones, which an optimizer that was
    made before still holds. One that was made while units were gathered, as the root is after a
    forward without gradients, holds whole parameters. Nothing else would show: a step finds no
    gradients and passes.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Iterable[weakref.ref[nn.Parameter]],
        *,
        groups: Sequence[Any] = (),
        warns: bool = True,
    ) -> None:
        """``before`` are the parameters before ``fcdp.shard``; none where it has not sharded.

        ``groups`` are FSDP2's of the model.
        """
        self._groups = groups
        self._warns = warns
        self._model = weakref.ref(model)
        here = set(map(id, model.parameters()))
        held = [param for each in before if (param := each()) is not None]
        # By identity: a set would compare the tensors' values.
        self._replaced = {id(param): weakref.ref(param) for param in held if id(param) not in here}
        #: Parameters that are not sharded, by their ids, of which nothing is to be said.
        self._plain = {*map(id, _plain_of(model).values())}
        #: Optimizers that were looked at, and how many parameters they had then.
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def refuse(self, optimizer: Optimizer) -> None:
        """Raise ``RuntimeError`` if ``optimizer`` has parameters that nothing trains.

        It was made before the model was sharded, or while units were gathered.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        model = self._model()
        # Cyclic's ranks without a parameter of their own step an optimizer of none.
        if model is None or not params or self._known.get(optimizer) == len(params):
            return
        gathered = {id(whole) for group in self._groups for whole in fsdp2.wholes(group)}
        if copies := sum(id(param) in gathered for param in params):
            raise RuntimeError(
                f"{type(optimizer).__name__}: {copies} of its {len(params)} parameters are "
                "gathered copies, so that its step would not train them: it was made while units "
                "were gathered, as the root is after a forward without gradients. Make the "
                "optimizer before that, or after model.reshard()"
            )
        replaced = ((self._replaced.get(id(param)), param) for param in params)
        lost = sum(there is not None and there() is param for there, param in replaced)
        if lost or self._may_be_older(params, model):
            raise RuntimeError(
                f"{type(optimizer).__name__}: {lost or len(params)} of its {len(params)} "
                "parameters are the model's no longer, so that its step would train nothing: "
                "sharding has put others in their place. Make the optimizer after fcdp.shard or "
                "fully_shard"
            )
        self._tell_of_added(params, model)
        if any(param.grad is not None for param in params):
            self._known[optimizer] = len(params)

    def _tell_of_added(self, params: list[Any], model: nn.Module) -> None:
        """Warn once of parameters that the model has been given since it was set up."""
        stepped = set(map(id, params))
        asked = stepped - self._plain
        added = [name for name, param in _plain_of(model).items() if id(param) in asked]
        if added and self._warns:
            self._warns = False
            logger.warning(
                f"{len(added)} parameters, such as {added[0]}, were added to the model after it "
                "was sharded: each rank trains a copy of its own; add them (add_adapter, resized "
                "embeddings) before fcdp.shard or fully_shard"
            )

    def _may_be_older(self, params: list[Any], model: nn.Module) -> bool:
        """Whether these plain tensors without a gradient have the shapes of the model's parameters.

        Those of all parameters, or of the trained ones, count: the optimizer of another model is
        not refused.
        """
        ours = [*model.parameters()]
        here = set(map(id, ours))
        if any(
            param.grad is not None or isinstance(param, DTensor) or id(param) in here
            for param in params
        ):
            return False
        trained = [param for param in ours if param.requires_grad]
        shapes = Counter(param.shape for param in params)
        return shapes in (
            Counter(param.shape for param in ours),
            Counter(param.shape for param in trained),
        )


def _plain_of(model: nn.Module) -> dict[str, nn.Parameter]:
    params = model.named_parameters()
    return {name: param for name, param in params if not isinstance(param, DTensor)}


_followers: WeakSet[Follower] = WeakSet()
_hooked = False


def follow_optimizers(follower: Follower) -> None:
    """Call the follower around each step of each optimizer, for as long as it lives.

    PyTorch's global hooks are the only ones that see them all. They are registered once and stay: a
    follower that took its own away when it ends, whenever the garbage collector runs, would change
    the list of hooks while a step goes through it.
    """
    global _hooked
    _followers.add(follower)
    if not _hooked:
        _hooked = True
        # Here, as it imports torch's compiler, which takes as long as importing all of FSDP2.
        register_optimizer_step_pre_hook(untraced(_before_step))
        register_optimizer_step_post_hook(untraced(_after_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Call followers before a step: one with a closure, once that has computed gradients."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        _notify(optimizer)
        return None
    announced = False

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        nonlocal announced
        loss = closure(*args, **kwargs)
        if not announced:
            announced = True
            _notify(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluated}
    return (args[0], evaluated, *args[2:]), kwargs


def _notify(optimizer: Optimizer) -> None:
    for follower in [*_followers]:
        follower.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for follower in [*_followers]:
        follower.after_step(optimizer)
