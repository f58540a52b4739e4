"""ZeRO-3 as PyTorch ships it: FSDP2 over all ranks; each gather and reduction crosses nodes.

Three schedules differ: shards inside the node (MiCS, hybrid sharding), where gradients alone cross,
once per step; a cache on the device (hpZ), where per micro-batch forward gathers across nodes and
backward inside; and, of all ranks' shards or a node's, parameters on the host (ZeRO-Offload), whose
optimizer steps there too: on a CPU that is the same without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

from baselines.settings import FSDP2Settings
from baselines.strategy import (
    Job,
    Trainable,
    crossing_bytes,
    make_optimizer,
    numel,
    replicated_bytes,
    trainable_parameters,
    trained_numel,
    zero3_bytes,
)
from fcdp.checkpoint.held import Held, Part


def build(model: nn.Module, job: Job) -> FSDP2:
    """Shard every block and the root, over all ranks or those of a node; each is a unit."""
    topology = job.topology
    if job.schedule.shards == "node":
        closed_form = replicated_bytes(model, job)
        sizes = topology.nodes, topology.ranks_per_node
        names = "replicate", "shard"
        by_node = init_device_mesh(topology.mesh.device_type, sizes, mesh_dim_names=names)
        shard_each(model, job, by_node, offload_policy=offload_policy(job))
        return FSDP2(model, job, closed_form)
    if job.schedule.cache is None:
        closed_form = zero3_bytes(model, job)
        shard_each(model, job, topology.mesh, offload_policy=offload_policy(job))
        return FSDP2(model, job, closed_form)
    moved = numel(model.parameters()) + trained_numel(model)
    closed_form = crossing_bytes(moved, job) * job.accumulation
    with _one_mesh_for_all():
        shard_each(model, job, topology.mesh, reshard_after_forward=topology.ranks_per_node)
    return FSDP2(model, job, closed_form)


def offload_policy(job: Job) -> OffloadPolicy:
    """Where shards wait, and the optimizer steps, by the schedule."""
    if job.schedule.parameters == "device":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())


@contextmanager
def _one_mesh_for_all() -> Iterator[None]:
    """Let all modules share one mesh that they reshard to.

    FSDP2 makes one per module, each with process groups of its own: a model of many layers runs
    out of them.
    """
    make = _fsdp_init._get_post_forward_mesh_info
    made: list[Any] = []

    def once(*args: Any) -> Any:
        if not made:
            made.append(make(*args))
        return made[0]

    with ExitStack() as patches:
        for module in (_fsdp_init, _fully_shard):
            if hasattr(module, make.__name__):
                patches.enter_context(mock.patch.object(module, make.__name__, once))
        yield


def shard_each(model: nn.Module, job: Job, mesh: DeviceMesh, **more: Any) -> None:
    """Shard every block and the root over a mesh, by FSDP2; ``more`` is as it takes it."""
    for module in [*job.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=mixed_precision(job.dtype), **more)


def mixed_precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The policy to gather, compute and reduce in ``dtype``, whatever this torch's default is."""
    if dtype == torch.float32:  # the parameters' own: inputs need no cast
        return MixedPrecisionPolicy(reduce_dtype=dtype)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)


class FSDP2(Trainable):
    """The plain training loop: a reduction per micro-batch, then the optimizer's step."""

    def __init__(self, model: nn.Module, job: Job, closed_form_bytes: float) -> None:
        super().__init__(model, job, closed_form_bytes)
        self.optimizer = make_optimizer(trainable_parameters(model), job)

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        first, *others = (
            self.backward(batch, last=index == len(micro_batches) - 1)
            for index, batch in enumerate(micro_batches)
        )
        total = sum(others, first)
        with self._timed("optimizer"):
            self.update()
            self.optimizer.zero_grad()
        return total

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Keep blocks gathered, where settings say so, until the next backward reshards them."""
        settings = self.job.settings
        once = isinstance(settings, FSDP2Settings) and settings.forwards == "unsharded"
        blocks = [each for each in self.job.blocks if once and isinstance(each, FSDPModule)]
        for block in blocks:
            block.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for block in blocks:
                block.set_reshard_after_forward(True, recurse=False)

    def held(self) -> Held:
        return Held([Part(self.model, self.optimizer)], self.job.topology)

    def update(self) -> None:
        """Step by the gradients of all micro-batches."""
        self.optimizer.step()

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's mean loss.

        Gradients are reduced each time: ``set_requires_gradient_sync(False)`` would keep the whole
        model's gradients on every rank, which is not ZeRO-3 any more and does not fit at 30B.
        Those that are sharded inside the node cross nodes with the last one alone.
        """
        if self.job.schedule.shards == "node":
            assert isinstance(self.model, FSDPModule)
            self.model.set_requires_all_reduce(last)
        with self.casting():
            with self._timed("forward"):
                loss = self.job.loss(self.model, batch) / self.job.accumulation
            with self._timed("backward"):
                loss.backward()
        return loss.detach()
