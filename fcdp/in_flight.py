"""Reductions in flight: on CPUs gradients cross nodes while backward goes on.

An accelerator's streams overlap by themselves. On a CPU one thread computes, issues and waits, but
gloo's own threads move bytes: what is issued need not be waited for at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fcdp.counts import in_backward, profiled
from fcdp.exchange import Op, Pending, Then, wait_all
from fcdp.failure import Failures
from fcdp.reduce_scatter import HierarchicalReduceScatter
from fcdp.unit import Unit

#: Reductions across nodes that one engine has in flight. One travels while the next is computed;
#: with a second, a block that computes for longer than the others leaves the link no gap. Each
#: holds 1/L of its unit's gradients, and (n−1)/n of that for what arrives from the other nodes.
MOST_IN_FLIGHT = 2


@dataclass(eq=False)
class Crossing:
    """One unit's reduction across nodes, from the allocation of its output on."""

    unit: Unit
    queue: InFlight
    #: Exchanges to wait for and what follows them, in order; ``None`` if nothing is under way.
    exchange: list[Pending] | None = None
    #: Whether it was given up: whoever reads it finds that it did not arrive.
    broken: bool = False

    def end(self) -> None:
        """Wait for it, and for those before it.

        Raises ``RuntimeError`` for one whose end an error has interrupted.
        """
        if self.exchange is not None:
            self.queue.finish(self)
        if self.broken:
            raise RuntimeError(
                f"{self.unit.name}: its gradients did not arrive from the other nodes, because an "
                "error ended the exchange; drop them with optimizer.zero_grad()"
            )


class InFlight:
    """The reductions of one engine that cross nodes while backward goes on, oldest first.

    When each is waited for changes no exchange's place among all: exchanges are issued in the same
    order, and those of two ranks are matched by that. Ranks may therefore wait at different times,
    as where a hook on one of them reads a gradient.
    """

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._crossings: list[Crossing] = []
        #: Exchanges whose end was interrupted: gloo may still write to their memory.
        self._interrupted: list[list[Pending]] = []
        #: The backward that will call back at its end; one that fails does not.
        self._followed = -1

    def start(self, crossing: Crossing, exchange: Callable[[], list[Pending]]) -> None:
        """Start a reduction, once there is room for it; it ends with the backward at the latest."""
        while len(self._crossings) >= MOST_IN_FLIGHT:
            self._finish_oldest()
        with profiled("reduce_inter", crossing.unit.name):
            crossing.exchange = exchange()
        self._crossings.append(crossing)
        if not in_backward():
            self.finish()
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._followed:
            self._followed = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def finish(self, last: Crossing | None = None) -> None:
        """Wait for all reductions in flight, or for those up to ``last``."""
        while self._crossings and (last is None or last in self._crossings):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        crossing = self._crossings.pop(0)
        exchange = crossing.exchange
        assert exchange is not None
        try:
            with profiled("reduce_wait", crossing.unit.name), self._failures.completing():
                wait_all(exchange)
                crossing.exchange = None
                for param in crossing.unit.params:  # plain tensors again
                    grad: Any = param.grad
                    if isinstance(local := getattr(grad, "_local_tensor", None), Arriving):
                        grad._local_tensor = local.plain
        except BaseException:
            crossing.exchange, crossing.broken = None, True
            self._interrupted.append(exchange)
            raise
        self._interrupted.clear()  # what a connection carries arrives in order


class Arriving(torch.Tensor):
    """A gradient that may still be on its way; whatever reads it waits for it first.

    FSDP2 divides what was reduced, casts the whole of it to the parameters' dtype and cuts it into
    views. None of them reads: the division and the cast follow the exchange, and views arrive with
    the whole. Anything else, as an addition to gradients that are there already or a hook, ends the
    exchange at once: its cast too, as nobody makes that a plain tensor later. Plain tensors take
    these ones' places in ``.grad`` when backward ends.
    """

    plain: torch.Tensor
    crossing: Crossing
    whole: bool

    @staticmethod
    def __new__(cls, values: torch.Tensor, crossing: Crossing, *, whole: bool = False) -> Arriving:
        made: Arriving = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        made.plain, made.crossing, made.whole = values, crossing, whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first, *others = args
        if isinstance(first, Arriving) and (exchange := first.crossing.exchange) is not None:
            if func is torch.ops.aten.as_strided.default:
                return Arriving(func(first.plain, *others, **kwargs), first.crossing)
            if func is torch.ops.aten.div_.Tensor and isinstance(others[0], int | float):
                exchange.append(Then(partial(func, first.plain, *others)))
                return first
            casts = func is torch.ops.aten._to_copy.default and [*kwargs] == ["dtype"]
            if casts and first.whole:
                cast = torch.empty_like(first.plain, **kwargs)
                exchange.append(Then(partial(cast.copy_, first.plain)))
                return Arriving(cast, first.crossing, whole=True)
        return func(
            *tree_map_only(Arriving, Arriving.ended, args),
            **tree_map_only(Arriving, Arriving.ended, kwargs),
        )

    def ended(self) -> torch.Tensor:
        """The plain tensor, which has arrived."""
        self.crossing.end()
        return self.plain

    # Conversions that torch refuses to make of a subclass.

    def tolist(self) -> Any:
        return self.ended().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.ended().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.ended())


class HostReduceScatter(HierarchicalReduceScatter):
    """The hierarchical reduce-scatter on a CPU, whose output may still be on its way."""

    def __init__(self, unit: Unit, in_flight: InFlight, **parts: Any) -> None:
        """``parts`` are those of :class:`HierarchicalReduceScatter`."""
        super().__init__(unit, **parts)
        self._in_flight = in_flight

    def _as_output(self, buffer: torch.Tensor) -> torch.Tensor:
        if not self._goes_on:
            return buffer
        return Arriving(buffer, Crossing(self._unit, self._in_flight), whole=True)

    def _cross(self, output: torch.Tensor, partial: torch.Tensor, op: Op) -> None:
        """Start to reduce across nodes; complete when the output is read or backward ends."""
        if not isinstance(output, Arriving):
            super()._cross(output, partial, op)
            return
        plain = output.plain
        self._in_flight.start(output.crossing, lambda: self._sync(plain, partial, op))

    @property
    def _goes_on(self) -> bool:
        """Whether backward goes on while what is reduced crosses nodes.

        Not where a hook is to be called with it, nor round a ring, whose steps are waited for.
        """
        alone = self._topology.nodes == 1 or self._world is not None
        return not alone and not self._unit.hooked
