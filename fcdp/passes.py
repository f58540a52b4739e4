"""Where passes over a model begin: what ran before may have written its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn

from fcdp.ledger import in_backward
from fcdp.unit import Unit

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(hook: _Function) -> _Function:
    """Keep ``torch.compile`` from tracing a hook, whose decisions are no part of a graph."""
    return cast(_Function, torch.compiler.disable(hook))


class Passes:
    """Tells the gathers that begin a pass from those that go on with one.

    A forward of the model begins one, which goes on through its backward. So does the outermost
    FSDP2 module's forward or registered forward method that is called by itself, and every
    ``unshard()`` outside of a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._in_forward = False
        #: FSDP2's state of the module whose own pass is under way.
        self._outermost: Any = None

    def follow(self, begin: Callable[[], None]) -> None:
        """Call ``begin`` before each forward of the model, recomputations apart."""

        @untraced
        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():  # a recomputation belongs to the forward that it repeats
                self._in_forward, self._outermost = True, None
                begin()

        @untraced
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self._in_forward = False

        self._model.register_forward_pre_hook(before, prepend=True)
        self._model.register_forward_hook(after, always_call=True)

    def begins_with(self, unit: Unit) -> bool:
        """Whether the gather of ``unit`` begins a pass that is not the whole model's."""
        if self._in_forward or in_backward():
            return False
        outermost = unit.module._get_fsdp_state()._state_ctx.iter_forward_root
        if outermost is None:
            return True
        if outermost is self._outermost:
            return False
        self._outermost = outermost
        self._close_with(outermost)
        return True

    def _close_with(self, state: Any) -> None:
        """Forget the outermost module when its forward, or its forward method, has ended.

        FSDP2 hooks a module's forward, and wraps a registered method so that it looks
        ``_post_forward`` up when it ends.
        """
        plain = state._post_forward

        def close(*_: Any) -> None:
            self._outermost = None
            handle.remove()
            if "_post_forward" in state.__dict__:
                del state._post_forward

        @untraced
        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            close()
            return plain(module, args, output)

        handle = state._modules[0].register_forward_hook(close, always_call=True)
        state._post_forward = post_forward
