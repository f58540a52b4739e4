"""Every optimizer of the process, made by whomever, tells when it steps."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fcdp.passes import untraced


class Follower(Protocol):
    """Who wants to know."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


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
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


@untraced
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for follower in [*_followers]:
        follower.before_step(optimizer)


@untraced
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for follower in [*_followers]:
        follower.after_step(optimizer)
