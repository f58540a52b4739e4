"""Where passes over a model begin: what ran before may have written its parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn

from fcdp import fsdp2
from fcdp.counts import in_backward
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

    def __init__(self, model: nn.Module, kept: Sequence[Unit]) -> None:
        """``kept`` stay gathered after forward where FSDP2 would reshard them."""
        self._model = model
        self._kept = kept
        self._in_forward = False
        #: FSDP2's state of the module whose own pass is under way.
        self._outermost: Any = None
        #: Units that it has gathered so far.
        self._gathered: list[Unit] = []
        #: Whether the pass under way computes no gradients.
        self.without_gradients = False
        self._grad_enabled = True

    def follow(
        self, units: Sequence[Unit], begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Call ``begin`` before each forward of the model and ``end`` after it, if it raises too.

        Recomputations in backward are no forwards.
        """

        @untraced
        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():  # a recomputation belongs to the forward that it repeats
                self._in_forward, self._outermost = True, None
                self.without_gradients = not torch.is_grad_enabled()
                begin()

        @untraced
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not in_backward():
                self._in_forward = False
                end()
                self._let_go()

        self._model.register_forward_pre_hook(before, prepend=True)
        self._model.register_forward_hook(after, always_call=True)
        for unit in units:
            fsdp2.before_gathers(unit.group, self._note_mode)

    def _note_mode(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()

    def begins_with(self, unit: Unit) -> bool:
        """Whether the gather of ``unit`` begins a pass that is not the whole model's."""
        if self._in_forward or in_backward():
            return False
        outermost = fsdp2.outermost(unit.module)
        begins = outermost is None or outermost is not self._outermost
        if begins:
            self.without_gradients = not self._grad_enabled
        if outermost is not None:
            if begins:
                self._outermost = outermost
                self._close_with(outermost)
            self._gathered.append(unit)
        return begins

    def _let_go(self) -> None:
        """Reshard what stays gathered for a backward, where none will come.

        A later pass would use it as it is now, whatever an optimizer has written since.
        """
        if not torch.is_grad_enabled() and sys.exc_info()[0] is None:
            reshard(self._kept)

    def _close_with(self, state: Any) -> None:
        """Forget the outermost module when its forward, or its forward method, has ended.

        FSDP2 hooks a module's forward, and wraps a registered method so that it looks
        ``_post_forward`` up when it ends. A method that raises does not get there: the next one
        that begins ends it.
        """
        begin, plain = fsdp2.around_forward(state)

        def close(*_: Any) -> None:
            self._outermost = None
            handle.remove()
            fsdp2.restore_around_forward(state)
            gathered, self._gathered = self._gathered, []
            drop_prefetched(gathered)
            self._let_go()

        @untraced
        def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
            close()
            fsdp2.forget_outermost(state)
            return begin(module, args, kwargs)

        @untraced
        def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
            result = plain(module, args, output)
            close()
            return result

        handle = fsdp2.module_of(state).register_forward_hook(close, always_call=True)
        fsdp2.replace_around_forward(state, pre_forward, post_forward)


def reshard(units: Iterable[Unit]) -> None:
    """Let go of gathered parameters; a backward that still needs them gathers them again."""
    for unit in units:
        unit.module.reshard()


def drop_prefetched(units: Iterable[Unit]) -> None:
    """Forget what a pass prefetched and then skipped: by the next it may be stale."""
    for unit in units:
        if fsdp2.prefetched(unit.group) is not None:
            unit.module.unshard()
            unit.module.reshard()
