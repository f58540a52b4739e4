"""The beginnings of passes over a model, before which its parameters may be written."""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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


@dataclass(eq=False)
class Passes:
    """Distinguishes the gathers that begin a pass from those that continue one.

    A forward of the model begins one, which goes on through its backward. So does the outermost
    FSDP2 module's forward or registered forward method that is called by itself, and every
    ``unshard()`` outside of a forward.
    """

    model: nn.Module
    #: Units that FCDP keeps gathered after forward, where FSDP2 would reshard them: for as long as
    #: the user does not say otherwise.
    not_resharded: Sequence[Unit]
    #: Whether the pass under way computes no gradients.
    without_gradients: bool = False

    def __post_init__(self) -> None:
        self._in_forward = False
        #: FSDP2's state of the module whose own pass is under way.
        self._outermost: Any = None
        #: Units that it has gathered so far.
        self._gathered: list[Unit] = []
        self._grad_enabled = True
        #: Units that the user has gathered by ``unshard()``, until he or a forward reshards them.
        self._by_hand: set[Unit] = set()
        for unit in self.not_resharded:
            fsdp2.leave_open(unit.module)

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
                self._end()

        self.model.register_forward_pre_hook(before, prepend=True)
        self.model.register_forward_hook(after, always_call=True)
        for unit in units:
            fsdp2.around_gathers(
                unit.group,
                self._before_gather,
                functools.partial(self._asked_for, unit),
                functools.partial(self._by_hand.discard, unit),
            )

    def _before_gather(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()

    def _asked_for(self, unit: Unit) -> None:
        if fsdp2.by_hand(unit.group):
            self._by_hand.add(unit)

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
                fsdp2.when_forward_ends(outermost, self._close)
            self._gathered.append(unit)
        return begins

    def let_go(self) -> None:
        """Reshard what FCDP keeps gathered; a backward that still needs it gathers it again.

        A later pass would use it as it is now, whatever an optimizer has written since. What the
        user keeps gathered, by ``set_reshard_after_forward`` or ``unshard()``, stays so, as in
        FSDP2: a forward that needs no gather there needs none here.
        """
        for unit in self.not_resharded:
            ours = fsdp2.keeps_root(fsdp2.state(unit.module))
            if ours and unit not in self._by_hand:
                unit.module.reshard()

    def drop_prefetched(self, units: Iterable[Unit]) -> None:
        """Forget what a pass prefetched and then skipped: by the next it may be stale."""
        asked_for = {*self._by_hand}
        for unit in units:
            if unit not in asked_for and fsdp2.prefetched(unit.group) is not None:
                unit.module.unshard()
                unit.module.reshard()
        self._by_hand &= asked_for  # not what these have gathered with a unit

    def _end(self) -> None:
        """A forward has ended; without gradients no backward will come."""
        if not torch.is_grad_enabled() and sys.exc_info()[0] is None:
            self.let_go()

    def _close(self) -> None:
        """Forget the outermost module, whose forward or forward method has ended."""
        self._outermost = None
        gathered, self._gathered = self._gathered, []
        self.drop_prefetched(gathered)
        self._end()
