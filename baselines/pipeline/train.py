"""A pipeline across nodes: node i is stage i, whose ranks shard it, or hold it whole.

Ranks of one place in their nodes are a pipeline. It trains on the micro-batches that these ranks
have under every other strategy, whole: n·k of a step for n nodes and k micro-batches of a rank.
Over the slow link go activations and their gradients, gradients of tied embeddings between the
first stage and the last, and the tokens, since masks are made where they are used.

Messages of a pipeline share one process group, in whose order gloo matches them; collectives on it
come before and after the schedule alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from baselines.part import local_part, views
from baselines.pipeline import schedules
from baselines.pipeline.cut import Anatomy, look
from baselines.pipeline.stage import Stage, skeleton
from baselines.presets.fcdp import node_bytes
from baselines.pytorch.fsdp2 import mixed_precision
from baselines.settings import PipelineSettings
from baselines.strategy import Job, Trainable, make_optimizer
from fcdp.counts import Ledger


def build(model: nn.Module, job: Job) -> Pipeline:
    """Cut the model into one stage per node, or several, and shard each over the node's ranks.

    Raises ``ValueError`` for a model that cannot be cut, or not so often.
    """
    topology, per_node = job.topology, _settings_of(job).stages_per_node
    if topology.nodes == 1 and per_node > 1:
        raise ValueError(f"stages_per_node = {per_node}: allowed on one node is 1")
    anatomy = look(model, job)
    runs = anatomy.cut(job.blocks, topology.nodes * per_node)
    indices = range(topology.node, len(runs), topology.nodes)
    # The model itself is cut last, since it is whole no longer then.
    copies = [skeleton(model, job.blocks) for _ in indices[1:]]
    # Zero bubble finds the parameters of a stage from its input on.
    tracks = _settings_of(job).pipeline_schedule == "zb"
    messages = _messages(job, anatomy, runs, all_back=tracks)  # while the model is whole
    stages = [
        Stage(*each, job, anatomy, runs, index, tracks=tracks)
        for each, index in zip([*copies, (model, job.blocks)], indices, strict=True)
    ]
    mesh = _mesh(job)
    for stage in stages:
        _shard(stage, mesh, job.dtype)
    return Pipeline(model, job, anatomy, stages, messages)


def _messages(job: Job, anatomy: Anatomy, runs: Sequence[range], *, all_back: bool) -> list[int]:
    """By node, how many tensors a micro-batch has it hand on and back to other nodes.

    A gradient goes back to a stage that is trained, or that comes after one that is; or to all.
    """
    nodes = job.topology.nodes
    if nodes == 1:
        return [0]
    counts = [0] * nodes
    trained = any(param.requires_grad for param in anatomy.before)
    for index, run in enumerate(runs):
        counts[index % nodes] += (index > 0 and (trained or all_back)) + (index < len(runs) - 1)
        blocks = job.blocks[run.start : run.stop]
        trained |= any(param.requires_grad for block in blocks for param in block.parameters())
    return counts


def _settings_of(job: Job) -> PipelineSettings:
    """The job's settings, as ``baselines.strategy.load`` has checked them."""
    assert isinstance(job.settings, PipelineSettings), f"{job.settings!r}: must be a pipeline's"
    return job.settings


def _sharers(job: Job) -> int:
    """Ranks of a node that share one copy of its stages."""
    sharded = _settings_of(job).within_stage == "sharded"
    return job.topology.ranks_per_node if sharded else 1


def _mesh(job: Job) -> DeviceMesh:
    """The ranks of this node, which shard a stage or replicate it."""
    topology, shards = job.topology, _sharers(job)
    sizes = topology.nodes, topology.ranks_per_node // shards, shards
    names = "stage", "replicate", "shard"
    mesh = init_device_mesh(topology.mesh.device_type, sizes, mesh_dim_names=names)
    return mesh["replicate", "shard"] if shards == 1 else mesh["shard"]


def _shard(stage: Stage, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard a stage, gathered and reduced once a step, as PyTorch's schedules have it.

    Meanwhile the gradients of micro-batches add up on every rank, in float32 or more.
    """
    policy = mixed_precision(dtype)
    if dtype.itemsize < torch.float32.itemsize:
        policy = replace(policy, reduce_dtype=torch.float32)
    for module in [*stage.blocks, stage]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    stage.join()


class Pipeline(Trainable):
    """The stages of one rank, and the schedule by which they compute."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        anatomy: Anatomy,
        stages: Sequence[Stage],
        messages: Sequence[int],
    ) -> None:
        """``messages``: by node, how many tensors a micro-batch has it hand on and back."""
        super().__init__(model, job, closed_form_bytes=0.0)
        topology, settings = job.topology, _settings_of(job)
        self.stages = stages
        self._group = topology.inter
        self._micro_batches = topology.nodes * job.accumulation
        count, device = topology.nodes * settings.stages_per_node, topology.mesh.device_type
        self._schedule = schedules.make(
            settings.pipeline_schedule,
            [
                PipelineStage(stage, stage.index, count, torch.device(device), group=self._group)
                for stage in stages
            ],
            self._micro_batches,
        )
        self._tied = _Tied(job, anatomy.tied, stages)
        self._anatomy, self._messages = anatomy, messages
        #: The shape of a step's micro-batches of one rank, the first step's, which PyTorch's
        #: schedules take for all steps'.
        self._shape: torch.Size | None = None
        self._ledger = Ledger()
        params = [p for each in stages for p in each.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(params, job)

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One optimizer step; returns the mean loss of all ranks of this pipeline, a scalar.

        Raises ``ValueError`` for micro-batches of another shape than those of the first step.
        """
        batches = self._of_all_stages(micro_batches)
        losses: list[torch.Tensor] = []
        with self._timed("pipeline"):
            arrives = [batches] if self.stages[0].is_first else []
            self._schedule.step(
                *arrives, target=batches, losses=losses, return_outputs=False, batch=batches
            )
            self._tied.add_up()
        with self._timed("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._count()
        return self._from_last_stage(torch.stack(losses).mean().detach() if losses else None)

    def _of_all_stages(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """The micro-batches of all ranks of this pipeline, one after another, in their order."""
        own = torch.cat([*micro_batches])
        if self._shape is None:
            self._shape = own.shape
            self.closed_form_bytes = self._least_bytes(*own.shape)
        if own.shape != self._shape:
            raise ValueError(
                f"micro-batches of a step have shape {tuple(own.shape)} together: a pipeline "
                f"allows that of its first step alone, {tuple(self._shape)}"
            )
        nodes = self.job.topology.nodes
        sent = own.int() if own.dtype == torch.int64 else own  # whose range holds any token
        parts = [torch.empty_like(sent) for _ in range(nodes)]
        dist.all_gather(parts, sent, group=self._group)
        self._ledger.add("inter_node", "forward", (nodes - 1) * sent.nbytes)
        return torch.cat(parts).to(own.dtype)

    def _from_last_stage(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The pipeline's mean loss, which its last stage alone has."""
        device = self.job.topology.mesh.device_type
        # The other stages do not know the loss's type.
        loss = torch.zeros((), device=device) if loss is None else loss
        loss = loss.double()
        dist.broadcast(loss, group=self._group, group_src=self.job.topology.nodes - 1)
        return loss

    def _count(self) -> None:
        """Count the messages that this rank has sent in the step, but for the tokens."""
        across = self.stages if self.job.topology.nodes > 1 else ()
        forward = self._micro_batches * sum(each.left_bytes for each in across)
        backward = self._micro_batches * sum(each.gradient_bytes for each in across)
        self._ledger.add("inter_node", "forward", forward)
        self._ledger.add("inter_node", "backward", backward)
        self._ledger.add("inter_node", "reduce", self._tied.nbytes)

    def _least_bytes(self, sequences: int, tokens: int) -> float:
        """Least bytes per step of the busiest node, for a rank's sequences and their tokens."""
        topology, anatomy = self.job.topology, self._anatomy
        positions = topology.nodes * sequences * (tokens - anatomy.dropped)
        message = positions * anatomy.width * self.job.dtype.itemsize
        tied = anatomy.tied_bytes / _sharers(self.job) * (topology.nodes > 1)
        ends = max(self._messages[0], self._messages[-1]) * message + tied
        all_tokens = (topology.nodes - 1) * sequences * tokens * torch.int32.itemsize
        least = all_tokens + max(ends, max(self._messages) * message)
        return topology.ranks_per_node * float(least)

    def take_ledger(self) -> dict[str, dict[str, float]]:
        return node_bytes(self._ledger, self.job.topology)

    def take_metrics(self) -> Mapping[str, Any]:
        settings, nodes = _settings_of(self.job), self.job.topology.nodes
        count = self._micro_batches
        waits = schedules.bubble(settings.pipeline_schedule, nodes, settings.stages_per_node, count)
        return {"pipeline_micro_batches": count, "pipeline_bubble": waits}

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Each rank's examples go through the stages in turn, whatever their shapes."""
        batches: list[Any] = [None] * self.job.topology.nodes
        dist.all_gather_object(batches, batch.cpu(), group=self._group)
        with ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(_evaluating(stage, self.job))
            measured = [self._measured(each.to(batch.device)) for each in batches]
        return measured[self.job.topology.node]

    def _measured(self, batch: torch.Tensor) -> torch.Tensor:
        """Measure a batch that all ranks of the pipeline have; the last stage does."""
        node, nodes = self.job.topology.node, self.job.topology.nodes
        result: list[Any] = [None]

        def arrive() -> torch.Tensor:
            arrived: list[Any] = [None]
            dist.recv_object_list(arrived, group=self._group, group_src=(node - 1) % nodes)
            tensor: torch.Tensor = arrived[0]
            return tensor.to(batch.device)

        for stage in self.stages:
            out = stage(arrive, batch)
            if stage.is_last:
                result = [out.cpu()]
            else:
                dist.send_object_list([out.cpu()], group=self._group, group_dst=(node + 1) % nodes)
        dist.broadcast_object_list(result, group=self._group, group_src=nodes - 1)
        measured: torch.Tensor = result[0]
        return measured.to(batch.device)

    def state(self) -> dict[str, torch.Tensor]:
        """Whole parameters by the names that they have in the model, on rank 0; elsewhere nothing.

        All ranks call it together.
        """
        own = {
            name: param.full_tensor() if isinstance(param, DTensor) else param
            for stage in self.stages
            for name, param in stage.model.named_parameters()
        }
        first = self.job.topology.rank == 0
        nodes: list[Any] | None = [None] * self.job.topology.nodes if first else None
        if self.job.topology.local_rank == 0:
            cpu = {name: tensor.detach().cpu() for name, tensor in own.items()}
            dist.gather_object(cpu, nodes, group=self._group, group_dst=0)
        return {name: tensor for node in nodes or () for name, tensor in node.items()}


@contextmanager
def _evaluating(stage: Stage, job: Job) -> Iterator[None]:
    """Have a stage measure; its parameters are sharded again afterwards."""
    stage.eval()
    stage.function = job.measure or job.loss
    try:
        yield
    finally:
        stage.train()
        stage.function = job.loss
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Tied:
    """Trained parameters that the first stage and the last one hold: tied embeddings.

    Each has a part of their gradient; both step by the sum, and so stay equal.
    """

    def __init__(self, job: Job, names: Sequence[str], stages: Sequence[Stage]) -> None:
        topology = job.topology
        ends = [stage for stage in stages if stage.is_first != stage.is_last]
        self._params = [stage.model.get_parameter(name) for stage in ends for name in names]
        #: Bytes that this rank sends a step: those of its part.
        self.nbytes = sum(local_part(param).nbytes for param in self._params)
        self._group: dist.ProcessGroup | None = None
        for local_rank in range(topology.ranks_per_node if names and topology.nodes > 1 else 0):
            last = (topology.nodes - 1) * topology.ranks_per_node + local_rank
            # All ranks make it, also those that are not in it.
            group = dist.new_group([local_rank, last])
            if topology.local_rank == local_rank:
                self._group = group

    @torch.no_grad()
    def add_up(self) -> None:
        """Add up the two parts of all gradients, in one message."""
        if not self._params:
            return
        for param in self._params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        parts = [local_part(param.grad) for param in self._params if param.grad is not None]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=self._group)
        torch._foreach_copy_(parts, views(flat, parts))
