"""The hierarchical reduce-scatter: inside the node first, then 1/L of it across nodes."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from fcdp import fsdp2
from fcdp.counts import Ledger, profiled
from fcdp.exchange import (
    Op,
    Pending,
    Then,
    reduce_scatter,
    reduce_scatter_parts,
    ring_bytes,
    ring_reduce_scatter,
    wait_all,
)
from fcdp.fsdp2 import ReduceScatter
from fcdp.hooks import ReduceHook
from fcdp.partial_gradients import PartialGradients, Waiting, waiting_in
from fcdp.unit import Unit


class HierarchicalReduceScatter(ReduceScatter):
    """FSDP2's gradient reduce-scatter of one unit, rank order kept: input is (nodes, L, s).

    FSDP2 calls it on its stream of reductions, in whose order everything here runs, by one
    collective inside the node and one across. Their groups are not those of the gathers, which
    therefore never queue behind a reduction. On the CPU, where the thread that computes would wait,
    :class:`fcdp.in_flight.HostReduceScatter` has backward go on while gradients cross nodes.

    While ``requires_sync`` is false, gradients stay inside the node, (nodes, s) per rank, until the
    last micro-batch (paper: partial gradients). What crosses nodes does so as ``hook`` has it.

    With ``world`` exchanges are flat: one collective over all ranks, which has ended on return.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        partials: PartialGradients,
        ledger: Ledger,
        hook: ReduceHook | None = None,
        world: dist.ProcessGroup | None = None,
        crosses: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        """``crosses`` is called when gradients are about to cross nodes."""
        self._unit = unit
        self._topology = unit.topology
        self._partials = partials
        self._ledger = ledger
        self._hook = hook
        self._world = world
        self._crosses = crosses
        #: Set by ``fcdp.accumulate``: whether the next backward's gradients cross nodes.
        self.requires_sync = True
        #: Contents of ``.grad`` after the last micro-batch.
        self._waiting: list[Waiting] = []
        self._input_numel = 0
        #: FSDP2's parameters that earlier micro-batches gave gradients to.
        self._with_gradients: set[Any] = set()
        #: Those of them that the partial gradients have.
        self._summed: set[Any] = set()

    @property
    def pending(self) -> bool:
        """Whether partial gradients wait that have not crossed nodes."""
        return self._partials.count > 0

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate FSDP2's input buffer, or the output buffer that it asks for next.

        Raises ``RuntimeError`` if some of the unit's gradients were given up since the last
        micro-batch, or other parameters received gradients outside of ``fcdp.accumulate``: here, as
        nothing of FSDP2's is queued on the stream of reductions yet that would write to memory
        which the exception lets go.

        The sum of several micro-batches may be larger than fp16 can hold where each of them is not
        (FSDP2 adds them up in the parameters' dtype): it is handed over in fp32.
        """
        numel = math.prod(int(length) for length in size)
        is_output = numel * self._topology.world_size == self._input_numel
        self._input_numel = 0 if is_output else numel
        if not is_output:
            self.drop_abandoned()
            if self.pending:
                self._lacking(numel // self._topology.ranks_per_node)
        if is_output and dtype == torch.float16 and self.pending and self.requires_sync:
            dtype = torch.float32
        if is_output and self._topology.nodes > 1 and not self.requires_sync:
            return Waiting((numel,), (1,), dtype=dtype, device=device, whole=True)
        buffer = torch.empty(*size, dtype=dtype, device=device)
        return self._as_output(buffer) if is_output else buffer

    def _as_output(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return what FSDP2 gets as a reduction's output, in ``buffer``'s memory."""
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Op,
        async_op: bool = False,
    ) -> None:
        """Reduce ``input_tensor`` (nodes·L·s) over all ranks into ``output_tensor`` (s).

        Without sync, ``output_tensor`` is ``Waiting``, and so is ``.grad`` until the last
        micro-batch. Complete in stream order when it returns.
        """
        topology = self._topology
        topology.failures.backward_runs()
        self._ledger.reduce_dtypes.add(str(input_tensor.dtype).removeprefix("torch."))
        if self._world is not None:
            with profiled("reduce_inter", self._unit.name), topology.exchanges:
                ring_reduce_scatter(output_tensor, input_tensor, op=op, group=self._world)
            self._ledger.add_both("reduce", *ring_bytes(output_tensor.nbytes, topology))
            return
        with profiled("reduce_intra", self._unit.name):
            if topology.nodes == 1:
                self._reduce_in_node(output_tensor, input_tensor, op)
                return
            partial = input_tensor
            if topology.ranks_per_node > 1:
                partial = input_tensor.new_empty(input_tensor.numel() // topology.ranks_per_node)
                self._reduce_in_node(partial, input_tensor, op)
        pending = self.pending
        if pending and (wider := self._lacking(partial.numel())):
            self._partials.widen(wider, topology.nodes)
        if not self.requires_sync:
            self._keep(partial)
            self._hide()
            return
        self._crosses(self._unit)
        if pending:
            self._show()
        # PREMUL_SUM scales its input: where the node has reduced with it, once already.
        scaled = topology.ranks_per_node > 1 and op != dist.ReduceOp.AVG
        across = dist.ReduceOp.SUM if scaled else op
        self._cross(output_tensor, partial, across)

    def _cross(self, output: torch.Tensor, partial: torch.Tensor, op: Op) -> None:
        """Reduce across nodes; complete in stream order when it returns."""
        with profiled("reduce_inter", self._unit.name):
            exchange = self._sync(output, partial, op)
            if exchange:  # else all is queued
                with self._topology.failures.completing():
                    wait_all(exchange)

    def discard(self) -> None:
        """Forget partial gradients, as after a failed step."""
        self._partials.discard()
        self._show()

    def drop_abandoned(self) -> None:
        """Forget partial gradients of a step that was given up: ``.grad`` are gone, or zeroed.

        Raises ``RuntimeError`` if that holds for some of the unit's parameters: what waits of them
        is part of one sum.
        """
        if not self.pending:
            return
        held = {id(waiting_in(param)) for param in self._unit.params}
        remaining = [each for each in self._waiting if id(each) in held and not each.zeroed]
        if not remaining:
            self.discard()
        elif len(remaining) < len(self._waiting):
            raise RuntimeError(
                f"{self._unit.name}: .grad of some of its parameters were zeroed or set to None "
                "while gradients of earlier micro-batches wait to cross nodes; where a step is "
                "given up, do so with all of them, or call fcdp.discard(model)"
            )

    def accumulating(self) -> AbstractContextManager[None]:
        """In the body, make FSDP2 reduce all that an earlier micro-batch gave gradients to.

        It reduces what has received gradients. What waits of others would never cross nodes, or lie
        elsewhere in a partial gradient: they count as zeros. So do, in the sum, those that receive
        their first gradients now.
        """
        group, reduced = self._unit.group, False

        def complete() -> None:
            nonlocal reduced
            self.drop_abandoned()  # in this body, perhaps
            having = fsdp2.with_gradients(group)
            if not self.pending:
                self._with_gradients.clear()
            elif having or not reduced:
                for param in self._with_gradients - having:
                    fsdp2.give_zeros(param)
            self._with_gradients |= having
            reduced = True

        def note_waiting() -> None:
            self._waiting = [
                each for each in map(waiting_in, self._unit.params) if each is not None
            ]

        return fsdp2.around_reductions(group, complete, note_waiting)

    def _reduce_in_node(self, partial: torch.Tensor, gradients: torch.Tensor, op: Op) -> None:
        """Reduce (nodes, L, s) to (nodes, s), by one collective."""
        topology = self._topology
        with topology.exchanges:
            group = topology.reduce_intra
            wait_all(reduce_scatter_parts(partial, gradients, topology.nodes, op=op, group=group))
        sent = (topology.ranks_per_node - 1) * partial.nbytes
        self._ledger.add("intra_node", "reduce", sent)

    def _keep(self, partial: torch.Tensor) -> None:
        # With one rank per node ``partial`` is FSDP2's own buffer, which it will reuse.
        self._partials.add(partial, owned=self._topology.ranks_per_node > 1)
        self._summed = {*self._with_gradients}

    def _lacking(self, numel: int) -> list[tuple[int, bool]]:
        """Elements of each parameter with gradients, and whether the sum has it; [] if it has all.

        Asked while something waits. A micro-batch, of ``numel`` elements, may give gradients to
        more parameters than those before it. Raises ``RuntimeError`` if they are not known.
        """
        if self._partials.numel == numel:
            return []
        sizes = fsdp2.part_sizes(self._unit.group)
        parts = [
            (size, param in self._summed)
            for param, size in sizes.items()
            if param in self._with_gradients
        ]
        nodes = self._topology.nodes
        before = nodes * sum(size for size, has in parts if has)
        if (before, nodes * sum(size for size, _ in parts)) != (self._partials.numel, numel):
            raise RuntimeError(
                f"{self._unit.name}: other parameters received gradients in this backward than in "
                "the micro-batches that wait to cross nodes; run it under "
                "fcdp.accumulate(model, last=True)"
            )
        return parts

    def _hide(self) -> None:
        """Make gradients in ``.grad`` unreadable while others, which are added to them, wait."""
        for param in self._unit.params:
            grad: Any = param.grad
            if grad is not None and param.requires_grad and waiting_in(param) is None:
                local = grad._local_tensor
                size, stride = local.size(), local.stride()
                hidden = Waiting(size, stride, dtype=local.dtype, device=local.device)
                hidden.before, grad._local_tensor = local, hidden

    def _show(self) -> None:
        """Restore ``.grad`` without what waits: FSDP2 may then add the whole sum to it."""
        for param in self._unit.params:
            if (waiting := waiting_in(param)) is not None:
                if waiting.before is None:
                    param.grad = None
                else:
                    param.grad._local_tensor = waiting.before  # type: ignore[union-attr]

    def _sync(self, output: torch.Tensor, partial: torch.Tensor, op: Op) -> list[Pending]:
        """Start to reduce across nodes the sum of all micro-batches; complete once waited for."""
        if not self.pending:
            return self._reduce_across(output, partial, op)
        micro_batches = self._partials.count + 1
        total = self._partials.take(partial)
        if self._hook is not None and self._hook.wide:
            return self._reduce_across(output, total, op)
        if partial.dtype == torch.float16:
            # Scaled down to one micro-batch's magnitude, so that what FSDP2 can send per
            # micro-batch does not overflow here; by a power of two, which rounds nothing.
            scale = 2.0 ** math.ceil(math.log2(micro_batches))
            mean = torch.empty_like(output, dtype=partial.dtype)
            works = self._reduce_across(mean, (total / scale).to(partial.dtype), op)
            return [*works, Then(lambda: torch.mul(mean.to(output.dtype), scale, out=output))]
        return self._reduce_across(output, total.to(partial.dtype), op)

    def _reduce_across(self, output: torch.Tensor, partial: torch.Tensor, op: Op) -> list[Pending]:
        with self._topology.exchanges:
            if self._hook is not None:
                assert op == dist.ReduceOp.SUM, f"{op}: the engine asks FSDP2 for sums"
                return self._hook.start(output, partial)
            group = self._topology.reduce_inter
            works = reduce_scatter([output], [partial], op=op, group=group)
        self._ledger.add("inter_node", "reduce", (self._topology.nodes - 1) * output.nbytes)
        return works
