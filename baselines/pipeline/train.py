"""A pipeline across groups of nodes: group i is stage i, whose ranks shard it, or hold it whole.

A group is one node, or several over which FCDP shards the stage. Ranks of one place in their groups
are a pipeline. It trains on the micro-batches that these ranks have under every other strategy,
whole: g·k of a step for g groups and k micro-batches of a rank. Over the slow link go activations
and their gradients, gradients of tied embeddings between the first stage and the last, and the
tokens, since masks are made where they are used; and what FCDP exchanges inside of a group.

Messages of a pipeline share one process group, in whose order gloo matches them; collectives on it
come before and after the schedule alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from baselines.part import local_part, views
from baselines.pipeline import order, schedules
from baselines.pipeline.cached import CachedStage
from baselines.pipeline.cut import Anatomy, look
from baselines.pipeline.groups import Groups, settings_of
from baselines.pipeline.stage import Stage, skeleton
from baselines.presets import fcdp as preset
from baselines.pytorch.fsdp2 import FSDP2, mixed_precision
from baselines.schedule import FCDP
from baselines.settings import CacheSettings
from baselines.strategy import CacheUse, Job, Measure, Trainable
from fcdp import fsdp2, unchanged
from fcdp.checkpoint.held import Held, Part
from fcdp.counts import Ledger
from fcdp.engine import engine_of


def build(model: nn.Module, job: Job) -> Pipeline:
    """Cut the model into one stage per group, or several, and shard each over the group's ranks.

    Raises ``ValueError`` for a model that cannot be cut, or not so often, and for groups that do
    not divide the nodes.
    """
    groups, per_node = Groups.of(job), settings_of(job).stages_per_node
    if groups.count == 1 and per_node > 1:
        raise ValueError(f"stages_per_node = {per_node}: allowed on one group of nodes is 1")
    anatomy = look(model, job)
    runs = anatomy.cut(job.blocks, groups.count * per_node)
    indices = range(groups.index, len(runs), groups.count)
    # The model itself is cut last, since it is whole no longer then.
    copies = [skeleton(model, job.blocks) for _ in indices[1:]]
    # Zero bubble finds the parameters of a stage from its input on.
    tracks = settings_of(job).pipeline_schedule == "zb"
    # While the model is whole.
    messages = _messages(groups.count, job, anatomy, runs, all_back=tracks)
    stages = [
        Stage(*each, job, anatomy, runs, index, tracks=tracks)
        for each, index in zip([*copies, (model, job.blocks)], indices, strict=True)
    ]
    loops = [_sharded(stage, groups, job) for stage in stages]
    own = replace(job, blocks=stages[-1].blocks)  # as in ``_sharded``
    return Pipeline(model, own, groups, anatomy, stages, loops, messages)


def _messages(
    groups: int, job: Job, anatomy: Anatomy, runs: Sequence[range], *, all_back: bool
) -> list[int]:
    """By group, how many tensors a micro-batch has it hand on and back to other groups.

    A gradient goes back to a stage that is trained, or that comes after one that is; or to all.
    """
    if groups == 1:
        return [0]
    counts = [0] * groups
    trained = any(param.requires_grad for param in anatomy.before)
    for index, run in enumerate(runs):
        counts[index % groups] += (index > 0 and (trained or all_back)) + (index < len(runs) - 1)
        blocks = job.blocks[run.start : run.stop]
        trained |= any(param.requires_grad for block in blocks for param in block.parameters())
    return counts


def _sharded(stage: Stage, groups: Groups, job: Job) -> FSDP2:
    """Shard a stage over its group's ranks; returns the loop that updates it.

    FSDP2 gathers and reduces it once a step, as PyTorch's schedules have it: meanwhile the
    gradients of micro-batches add up on every rank, in float32 or more.
    """
    loop: FSDP2
    # Whoever holds a job of all blocks keeps the weights of other stages in memory.
    job = replace(job, blocks=stage.blocks)
    if groups.inside is not None:
        own = CacheSettings(partial_gradients=settings_of(job).partial_gradients)
        parts: dict[str, Any] = {"topology": groups.inside}
        parts |= {"accumulation": groups.count * job.accumulation}
        loop = preset.build(stage, replace(job, schedule=FCDP, settings=own, **parts))
    else:
        policy = mixed_precision(job.dtype)
        if job.dtype.itemsize < torch.float32.itemsize:
            policy = replace(policy, reduce_dtype=torch.float32)
        for module in [*stage.blocks, stage]:
            fully_shard(module, mesh=groups.mesh, mp_policy=policy, reshard_after_forward=False)
        loop = FSDP2(stage, job, 0.0)
    # Blocks cast what they are given. A batch may be floats that stand for tokens.
    state = fsdp2.state(stage)  # type: ignore[arg-type]
    state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False)
    stage.join()
    return loop


class Pipeline(Trainable):
    """The stages of one rank, and the schedule by which they compute."""

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        groups: Groups,
        anatomy: Anatomy,
        stages: Sequence[Stage],
        loops: Sequence[FSDP2],
        messages: Sequence[int],
    ) -> None:
        """``loops`` update the stages.

        ``messages``: by group, how many tensors a micro-batch has it hand on and back.
        """
        super().__init__(model, job, closed_form_bytes=0.0)
        settings, device = settings_of(job), torch.device(job.topology.mesh.device_type)
        self.stages, self._loops = stages, loops
        self.policy = loops[0].policy
        self._groups, self._group = groups, groups.pipeline
        self._micro_batches = groups.count * job.accumulation
        count = groups.count * settings.stages_per_node
        kind = PipelineStage if groups.inside is None else CachedStage
        self._pipelined = [
            kind(each, each.index, count, device, group=self._group) for each in stages
        ]
        self._schedule = schedules.make(
            settings.pipeline_schedule, self._pipelined, self._micro_batches
        )
        self._tied = _Tied(groups, anatomy.tied, stages)
        self._messages = messages
        # Without its parameters, which other stages hold.
        self._width, self._dropped = anatomy.width, anatomy.dropped
        self._tied_bytes = anatomy.tied_bytes
        #: By group, least bytes per step that one of its nodes sends to its others.
        self._inside: list[Any] = [None] * groups.count
        mine = sum(loop.closed_form_bytes for loop in loops)
        dist.all_gather_object(self._inside, mine, group=self._group)
        #: The shape of a step's micro-batches of one rank, the first step's, which PyTorch's
        #: schedules take for all steps'.
        self._shape: torch.Size | None = None
        self._ledger = Ledger()

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One optimizer step; returns the mean loss of all ranks of this pipeline, a scalar.

        Raises ``ValueError`` for micro-batches of another shape than those of the first step.
        """
        batches = self._of_all_stages(micro_batches)
        losses: list[torch.Tensor] = []
        with self._timed("pipeline"), self._unchanged():
            for stage in self._pipelined:
                if isinstance(stage, CachedStage):
                    stage.gather_ahead()
            arrives = [batches] if self.stages[0].is_first else []
            self._schedule.step(
                *arrives, target=batches, losses=losses, return_outputs=False, batch=batches
            )
            self._tied.add_up()
        with self._timed("optimizer"):
            for loop in self._loops:
                loop.update()
                loop.optimizer.zero_grad()
        self._count()
        return self._from_last_stage(torch.stack(losses).mean().detach() if losses else None)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Between optimizer steps nobody writes: the ranks of a group agree once, if FCDP asks."""
        with ExitStack() as stack:
            for stage in self.stages if self._groups.inside is not None else ():
                stack.enter_context(unchanged(stage))
            yield

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
        count = self._groups.count
        sent = own.int() if own.dtype == torch.int64 else own  # whose range holds any token
        parts = [torch.empty_like(sent) for _ in range(count)]
        dist.all_gather(parts, sent, group=self._group)
        self._ledger.add("inter_node", "forward", (count - 1) * sent.nbytes)
        return torch.cat(parts).to(own.dtype)

    def _from_last_stage(self, loss: torch.Tensor | None) -> torch.Tensor:
        """The pipeline's mean loss, which its last stage alone has."""
        device = self.job.topology.mesh.device_type
        # The other stages do not know the loss's type.
        loss = torch.zeros((), device=device) if loss is None else loss
        loss = loss.double()
        dist.broadcast(loss, group=self._group, group_src=self._groups.count - 1)
        return loss

    def _count(self) -> None:
        """Count the messages that this rank has sent in the step, but for the tokens."""
        across = self.stages if self._groups.count > 1 else ()
        forward = self._micro_batches * sum(each.left_bytes for each in across)
        backward = self._micro_batches * sum(each.gradient_bytes for each in across)
        self._ledger.add("inter_node", "forward", forward)
        self._ledger.add("inter_node", "backward", backward)
        self._ledger.add("inter_node", "reduce", self._tied.nbytes)

    def _least_bytes(self, sequences: int, tokens: int) -> float:
        """Least bytes per step of the busiest node, for a rank's sequences and their tokens."""
        groups = self._groups
        positions = groups.count * sequences * (tokens - self._dropped)
        message = positions * self._width * self.job.dtype.itemsize
        sent = [float(count * message) for count in self._messages]
        for end in (0, -1):
            sent[end] += self._tied_bytes / groups.sharers * (groups.count > 1)
        all_tokens = (groups.count - 1) * sequences * tokens * torch.int32.itemsize
        ranks = self.job.topology.ranks_per_node
        by_group = zip(sent, self._inside, strict=True)
        return float(max(ranks * (all_tokens + across) + inside for across, inside in by_group))

    def take_ledger(self) -> dict[str, dict[str, float]]:
        counts = preset.node_bytes(self._ledger, self.job.topology)
        total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for each in (counts, *(loop.take_ledger() or {} for loop in self._loops)):
            for link, phases in each.items():
                for phase, count in phases.items():
                    total[link][phase] += count
        return {link: dict(phases) for link, phases in total.items()}

    @property
    def cache(self) -> CacheUse | None:
        return None if self._groups.inside is None else preset.cache_use(self.stages)

    @property
    def reduce_dtype(self) -> str | None:
        return self._loops[0].reduce_dtype

    def take_metrics(self) -> Mapping[str, Any]:
        settings, groups = settings_of(self.job), self._groups.count
        count, per_node = self._micro_batches, settings.stages_per_node
        waits = order.bubble(settings.pipeline_schedule, groups, per_node, count)
        return {"pipeline_micro_batches": count, "pipeline_bubble": waits}

    def apply(self, function: Measure, batch: torch.Tensor) -> torch.Tensor:
        """Each rank's batch goes through the stages in turn, whatever its shape."""
        batches: list[Any] = [None] * self._groups.count
        dist.all_gather_object(batches, batch.cpu(), group=self._group)
        self._ledger.add("inter_node", "forward", (self._groups.count - 1) * batch.nbytes)
        with ExitStack() as stack:
            stack.enter_context(self._unchanged())
            for stage in self.stages:
                stack.enter_context(_applying(function, stage))
            results = [self._applied(each.to(batch.device)) for each in batches]
        return results[self._groups.index]

    def _applied(self, batch: torch.Tensor) -> torch.Tensor:
        """Apply to a batch that all ranks of the pipeline have; the last stage does."""
        index, count = self._groups.index, self._groups.count
        result: list[Any] = [None]

        def arrive() -> torch.Tensor:
            arrived: list[Any] = [None]
            dist.recv_object_list(arrived, group=self._group, group_src=(index - 1) % count)
            tensor: torch.Tensor = arrived[0]
            return tensor.to(batch.device)

        for stage in self.stages:
            out = stage(arrive, batch)
            receivers = count - 1 if stage.is_last else 1
            self._ledger.add("inter_node", "forward", receivers * out.nbytes)
            if stage.is_last:
                result = [out.cpu()]
            else:
                dist.send_object_list([out.cpu()], group=self._group, group_dst=(index + 1) % count)
        dist.broadcast_object_list(result, group=self._group, group_src=count - 1)
        applied: torch.Tensor = result[0]
        return applied.to(batch.device)

    def held(self) -> Held:
        cached = self._groups.inside is not None
        parts = [
            Part(stage.model, loop.optimizer, engine_of(stage) if cached else None)
            for stage, loop in zip(self.stages, self._loops, strict=True)
        ]
        return Held(parts, self.job.topology, self._group)

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
        parts: list[Any] | None = [None] * self._groups.count if first else None
        if self._groups.place == 0:
            cpu = {name: tensor.detach().cpu() for name, tensor in own.items()}
            dist.gather_object(cpu, parts, group=self._group, group_dst=0)
        return {name: tensor for part in parts or () for name, tensor in part.items()}


@contextmanager
def _applying(function: Measure, stage: Stage) -> Iterator[None]:
    """Have a stage compute its part of a function; its parameters are sharded again afterwards."""
    training, before = stage.model.training, stage.function
    stage.model.eval()
    stage.function = function
    try:
        yield
    finally:
        stage.model.train(training)
        stage.function = before
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


class _Tied:
    """Trained parameters that the first stage and the last one hold: tied embeddings.

    Each has a part of their gradient; both step by the sum, and so stay equal.
    """

    def __init__(self, groups: Groups, names: Sequence[str], stages: Sequence[Stage]) -> None:
        ends = [stage for stage in stages if stage.is_first != stage.is_last]
        self._params = [stage.model.get_parameter(name) for stage in ends for name in names]
        #: Bytes that this rank sends a step: those of its part.
        self.nbytes = sum(local_part(param).nbytes for param in self._params)
        self._group: dist.ProcessGroup | None = None
        for place in range(groups.ranks if names and groups.count > 1 else 0):
            # All ranks make it, also those that are not in it.
            group = dist.new_group([place, (groups.count - 1) * groups.ranks + place])
            if groups.place == place:
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
