"""Trained parameters that every rank keeps whole: one all-reduce of their gradients a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental import implicit_replication

from fcdp import fsdp2, ranges
from fcdp.counts import Ledger
from fcdp.exchange import all_reduce
from fcdp.topology import Topology

#: Outside of passes replicas meet DTensors, as where they are merged into sharded weights.
_mixing = contextlib.ExitStack()


class Replicas:
    """Parameters that ``adapters="replicated"`` keeps out of FSDP2's hands.

    Costs each rank parameters, gradients and optimizer state whole, where sharding costs 1/W of
    them; saves the gather, so that a step waits for one exchange instead of two. The bytes between
    nodes are the same: 2·(n−1)/n of them.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        model: nn.Module,
        topology: Topology,
        device: torch.device,
        ledger: Ledger,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.params = params
        self._topology = topology
        self._ledger = ledger
        self._reduce_dtype = reduce_dtype
        self._modules = _innermost(model, params)
        mine = set(params)
        #: Where they are, in modules that may leave the model or be left out.
        self._places = [
            (module, name, param)
            for module in model.modules()
            for name, param in module.named_parameters(recurse=False)
            if param in mine
        ]
        if self._modules:
            _mixing.enter_context(implicit_replication())
        self._equal = False
        #: The backward that will call back at its end; one that fails does not.
        self._followed = -1
        #: As of ``HierarchicalReduceScatter``: set by ``fcdp.accumulate``, and whether sums wait.
        self.requires_sync = True
        self.pending = False
        for param in params:
            if not param.is_meta:
                param.data = param.data.to(device)
            param.register_hook(functools.partial(self._scale, param))
            param.register_post_accumulate_grad_hook(self._accumulated)

    def make_equal(self) -> None:
        """Give all ranks what rank 0 has, before the first gather, once, outside of the ledger."""
        if self._equal:
            return
        self._equal = True
        topology = self._topology
        with torch.no_grad():
            for param in self.params:
                if topology.local_rank == 0 and topology.nodes > 1:
                    dist.broadcast(param, group=topology.inter, group_src=0)
                if topology.ranks_per_node > 1:
                    dist.broadcast(param, group=topology.intra, group_src=0)

    def check_in_place(self) -> None:
        """Raise ``RuntimeError`` if the model has other parameters in these ones' place."""
        if any(module._parameters.get(name) is not param for module, name, param in self._places):
            raise RuntimeError(
                "adapters='replicated': other parameters have taken the place of the adapters, as "
                "by load_state_dict(assign=True); load without assign, or set FCDP up afterwards"
            )

    def discard(self) -> None:
        """Forget the sums that wait and what a failed backward has left."""
        for param in self.params:
            param.grad = None
        self.pending = False

    def drop_abandoned(self) -> None:
        """Forget that sums wait whose ``.grad`` are gone."""
        if all(param.grad is None for param in self.params):
            self.pending = False

    def accumulating(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: replicas are reduced at once, with whatever gradients they have."""
        return contextlib.nullcontext()

    def _scale(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
        """Scale what one backward adds, so that averaging divides it by the factor that is set.

        The sum cannot be divided by it later: ``.grad`` may hold earlier backwards' averages.
        """
        scale = self._topology.world_size / self._divide_factor(param)
        return grad if scale == 1 else grad * scale

    def _accumulated(self, param: torch.Tensor) -> None:
        """A gradient has landed; what follows the last of this backward is asked for once."""
        backward = torch._C._current_graph_task_id()
        if backward != self._followed:
            self._followed = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self.pending = not self.requires_sync
        if self.requires_sync:
            with ranges.named("reduce_replicas"):
                self._reduce()

    def _reduce(self) -> None:
        """Average ``.grad`` over all ranks.

        What an earlier backward has averaged already is the same on all ranks, and stays so.
        """
        held = [param for param in self.params if param.grad is not None]
        buffer = self._gather_up(held)
        inter, intra = all_reduce(buffer, self._topology)
        self._ledger.add("inter_node", "reduce", inter)
        self._ledger.add("intra_node", "reduce", intra)
        # Views of the buffer: no gradient is copied twice.
        sizes = [param.numel() for param in held]
        *means, _ = buffer.split([*sizes, buffer.numel() - sum(sizes)])
        buffer /= self._topology.world_size
        for param, mean in zip(held, means, strict=True):
            param.grad = mean.view_as(param).to(param.dtype)

    def _gather_up(self, held: Sequence[nn.Parameter]) -> torch.Tensor:
        """All gradients in one buffer of the reduce dtype, filled up to a multiple of the world."""
        grads = [param.grad.flatten() for param in held if param.grad is not None]
        widest = reduce(torch.promote_types, (grad.dtype for grad in grads))
        dtype = self._reduce_dtype or widest
        numel = sum(map(torch.numel, grads))
        padding = grads[0].new_zeros(-numel % self._topology.world_size, dtype=dtype)
        return torch.cat([*(grad.to(dtype) for grad in grads), padding])

    def _divide_factor(self, param: nn.Parameter) -> float:
        """Return the factor of the FSDP2 module that would have sharded the parameter."""
        module = self._modules.get(param)
        groups = [] if module is None else fsdp2.param_groups(module)
        factors = [fsdp2.divide_factor(group) for group in groups]
        return next((f for f in factors if f is not None), float(self._topology.world_size))


def _innermost(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, FSDPModule]:
    """Find the FSDP2 module around each parameter."""
    wanted = set(params)
    modules: dict[nn.Parameter, FSDPModule] = {}
    for module in model.modules():  # outer ones first
        if isinstance(module, FSDPModule):
            modules.update((param, module) for param in module.parameters() if param in wanted)
    return modules
