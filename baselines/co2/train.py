"""Local SGD, SlowMo and CO2: several local steps, then an outer update by the workers' mean.

Each worker takes τ steps of its own optimizer from a state that all share. Then the mean of the
workers' displacements is formed, and by it the shared state moves on. SlowMo waits for the mean;
CO2 starts the exchange, moves on by the mean of the round before, and trains meanwhile: nothing of
an exchange is waited for if τ steps take longer.

A round of CO2 on one worker, whose state is x (τ = 3)::

    step step step | Δ of the last round arrives; x − x_τ is sent; x ← x − …Δ… | step …

What differs from the paper's listing: displacements x_{t,0} − x_{t,τ} cross instead of parameters,
whose mean the listing then subtracts from x_{t,0}; so x_{t−1,0} need not be kept. Of the released
code nothing is taken: it discards what it has clipped, and reduces what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from baselines.part import views
from baselines.presets import fcdp
from baselines.pytorch.ddp import autocast
from baselines.pytorch.fsdp2 import FSDP2, shard_each
from baselines.settings import (
    CacheSettings,
    LocalSGDSettings,
    OuterPlace,
    Penalty,
    SlowMoSettings,
    divided,
)
from baselines.strategy import CacheUse, Job, Trainable, trainable_parameters, trained_numel
from fcdp import Topology
from fcdp.arena import Arena, aligned


@dataclass(frozen=True)
class Rule:
    """How the mean displacement of a round moves the state that all workers start from.

    m ← β·m + Δ/(Λ·γ), x ← x − α·γ·clamp(m, ±φ), with γ = 1 unless ``by_learning_rate``
    (Algorithm 1). All of it is element-wise over flat fp32 tensors, or a scalar that all workers
    know alike: what a worker shards its parts shard too, and all stay equal to the last bit.
    """

    interval: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    by_learning_rate: bool = False
    clip: float | None = None
    penalty: Penalty = "none"

    @classmethod
    def of(cls, settings: LocalSGDSettings) -> Rule:
        """The rule of a strategy's settings; Local SGD goes on from the mean."""
        if isinstance(settings, SlowMoSettings):
            own = settings.model_dump(exclude={"worker", "nodes_per_worker", "outer_on"})
            renamed = {name.removeprefix("outer_"): value for name, value in own.items()}
            return cls(**renamed)
        return cls(settings.interval)

    def scale(self, rate: float) -> float:
        """γ, of local steps with the learning rate ``rate``."""
        return rate if self.by_learning_rate else 1.0

    def staleness(self, moved: torch.Tensor, first_step: torch.Tensor) -> torch.Tensor:
        """The gap Λ ≥ 1 that a displacement of one round ago is divided by, a scalar.

        ``moved`` is the norm of the outer update that the displacement knows nothing of,
        ``first_step`` that of the first local step of its round, the mean over workers. The paper's
        formula is not public; these bound a round by its first step, the largest while the learning
        rate falls: ``first-step`` counts the staleness in such steps, ``first-steps`` in rounds of
        ``interval`` of them.
        """
        if self.penalty == "none":
            return torch.ones_like(moved)
        steps = self.interval if self.penalty == "first-steps" else 1
        return 1 + torch.where(first_step > 0, moved / (steps * first_step), 0)


class OuterState:
    """What all workers share after each round: where they start from, and the outer momentum."""

    def __init__(self, start: torch.Tensor, momentum: torch.Tensor) -> None:
        """Both float32 (elements), which become this state's own."""
        self.start = start
        self.momentum = momentum

    def absorb(self, rule: Rule, mean: torch.Tensor, gap: torch.Tensor, rate: float) -> None:
        """Take a mean displacement (elements), which is overwritten, into the momentum.

        ``gap`` is its staleness, a scalar, and ``rate`` the local steps' learning rate.
        """
        scale = rule.scale(rate)
        self.momentum.mul_(rule.momentum).add_(mean.div_(gap * scale))

    def move(self, rule: Rule, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the start by the momentum.

        Returns the sum of squares of what it moved by, and how many elements were clipped, scalars.
        """
        scale = rule.scale(rate)
        move = self.momentum
        clipped = torch.zeros((), device=move.device)
        if rule.clip is not None:
            clipped = (move.abs() > rule.clip).sum().float()
            move = move.clamp(-rule.clip, rule.clip)
        move = move * (rule.learning_rate * scale)
        self.start.sub_(move)
        return move.dot(move), clipped


@dataclass(frozen=True)
class Place:
    """One rank's place: what it trains of a worker, and whom it exchanges with."""

    #: The training of one worker, which knows nothing of the others.
    loop: FSDP2
    #: The ranks with the same part of each worker, one per worker.
    peers: dist.ProcessGroup
    #: The ranks that this worker is sharded over; ``None``: it is whole on this one.
    parts: dist.ProcessGroup | None
    #: Least bytes that one node sends to other workers when displacements cross once.
    exchange_bytes: float


def place(model: nn.Module, job: Job) -> Place:
    """Put the model under what trains a worker. Raises ``ValueError`` if workers do not fit."""
    settings, topology = job.settings, job.topology
    assert isinstance(settings, LocalSGDSettings)
    together = settings.nodes_per_worker
    if problem := divided(together, topology.nodes):
        raise ValueError(f"nodes_per_worker = {together}: {problem}")
    exchange = _exchange_bytes(trained_numel(model), topology.nodes, together)
    # What lies on the host is exchanged from there.
    backend = "gloo" if settings.outer_on == "host" else None
    if settings.worker == "rank":
        model.to(topology.mesh.device_type)
        everyone = _group(range(topology.world_size), backend)
        return Place(_Whole(model, job, 0.0), everyone, None, exchange)
    mesh = _by_worker(topology, together)
    parts = mesh["part"]
    loop: FSDP2
    if settings.worker == "node":
        shard_each(model, job, parts)
        loop = FSDP2(model, job, 0.0)
    else:  # what is gathered is cached on the hosts of the worker's own nodes
        own = Topology.of_mesh(parts, topology.ranks_per_node)
        loop = fcdp.build(model, replace(job, topology=own, settings=CacheSettings()))
    # Nothing else uses these groups: no gather queues behind the exchange, nor the other way.
    workers = mesh["worker"]
    peers = workers.get_group() if backend is None else _group(workers.mesh.tolist(), backend)
    return Place(loop, peers, parts.get_group(), exchange)


def _group(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup:
    group = dist.new_group(
        list(ranks), backend=backend, use_local_synchronization=True, group_desc="co2_workers"
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _exchange_bytes(elements: int, nodes: int, together: int) -> float:
    """Out and back as sums, in float32; a node has 1/``together`` of a worker."""
    workers = nodes / together
    return 2 * (workers - 1) / workers * elements / together * 4


def _by_worker(topology: Topology, together: int) -> DeviceMesh:
    size = together * topology.ranks_per_node
    return init_device_mesh(
        topology.mesh.device_type,
        (topology.world_size // size, size),
        mesh_dim_names=("worker", "part"),
    )


class _Whole(FSDP2):
    """A worker that is one rank: parameters stay float32, operations compute in the job's type."""

    def casting(self) -> AbstractContextManager[object]:
        return autocast(self.job)

    def backward(self, batch: torch.Tensor, *, last: bool) -> torch.Tensor:
        with self.casting():
            return super().backward(batch, last=last)


class Average:
    """A buffer of its own, never what is trained, and the all-reduce of it.

    Only this class touches the buffer while the all-reduce runs: the caller fills it before
    ``start`` and reads it after ``wait``. On CUDA the all-reduce waits for what the current stream
    has queued, and whoever waits orders the current stream after it; on the host gloo's threads
    move it.
    """

    def __init__(self, buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.buffer = buffer
        self._group = group
        self._work: dist.Work | None = None
        #: Whether the buffer has a round's sum in it, or will have.
        self.started = False

    def start(self) -> None:
        """Start to add up all workers' buffers."""
        assert self._work is None, "the last all-reduce has not been waited for"
        self._work = dist.all_reduce(self.buffer, group=self._group, async_op=True)
        self.started = True

    def settle(self) -> None:
        """Wait for the sum, if one is under way."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()

    def wait(self) -> None:
        """Have the mean in the buffer, which may then be overwritten."""
        self.settle()
        self.started = False
        self.buffer.div_(self._group.size())


class Flat:
    """Parameters in their order, end to end, in float32; of sharded ones this rank's shards."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self.numel = sum(part.numel() for part in self._parts())

    def copy_to(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the parameters to ``flat`` (elements); to the host's memory a copy is queued."""
        parts = self._parts()
        torch._foreach_copy_(views(flat, parts), parts, non_blocking=True)
        return flat

    def copy_from(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` (elements) to the parameters; from the host's memory a copy is queued."""
        parts = self._parts()
        torch._foreach_copy_(parts, views(flat, parts), non_blocking=True)

    def squared_distance(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum of squares of the differences from ``flat`` (elements), a scalar.

        Where ``flat`` is on the host, one parameter of it at a time is copied to the device.
        """
        parts = self._parts()
        squares = [
            (part - view.to(part.device, non_blocking=True)).square().sum()
            for part, view in zip(parts, views(flat, parts), strict=True)
        ]
        return torch.stack(squares).sum()

    def _parts(self) -> list[torch.Tensor]:
        # Anew each time: FSDP2 puts other shards in place when a model is loaded or moved.
        return [
            (param.to_local() if isinstance(param, DTensor) else param).detach()
            for param in self._params
        ]


_ITEM = torch.float32.itemsize


class Memory:
    """Three flat float32 tensors of one rank: ``start``, ``momentum`` and ``snapshot``.

    Who may touch what when, where they lie on the host of an accelerator:

    - copies to and from parameters are queued on the computing stream, so that they come after the
      steps before them and before those after; nothing is queued on any other stream;
    - the host reads or writes ``start`` and ``snapshot`` only once ``land`` has returned, with no
      copy queued since: a round ends with a copy to ``snapshot``, ``land``, all of the host's work,
      and a copy from ``start``, which the next round's ``land`` waits for;
    - ``momentum`` is the host's alone, and ``snapshot`` the all-reduce's while one is under way.

    On the device all of it is queued on the computing stream, and there is nothing to wait for.
    """

    def __init__(self, place: OuterPlace, numel: int, scalars: int, device: torch.device) -> None:
        """``numel`` elements each, and so many more at the snapshot's end."""
        #: Bytes of the host's memory that are taken, page-locked on CUDA; 0 on the device.
        self.host_bytes = 0
        self._device = device
        sizes = [numel, numel, numel + scalars]
        if place == "device":
            tensors = [torch.zeros(size, device=device) for size in sizes]
        else:
            self.host_bytes = sum(aligned(size * _ITEM) for size in sizes)
            # Its pages are zero at first, as the kernel gives them.
            self._arena = Arena(self.host_bytes, device)
            tensors = [self._arena.take(size * _ITEM).view(torch.float32) for size in sizes]
        self.start, self.momentum, self.snapshot = tensors

    def land(self) -> None:
        """Wait until the copies that are queued have been made, if the host is to see them."""
        if self.host_bytes and self._device.type != "cpu":
            backend: Any = torch.get_device_module(self._device)
            backend.current_stream().synchronize()


#: Scalars that cross with a displacement: squares of its norm and of the first step's.
_SCALARS = 2


def build(model: nn.Module, job: Job) -> LocalSteps:
    """Put the model under Local SGD, SlowMo or CO2: the mean is waited for, or arrives late."""
    settings = job.settings
    assert isinstance(settings, LocalSGDSettings)
    # Of the whole model, whose parts this rank has one of.
    elements = trained_numel(model)
    at = place(model, job)
    late = job.schedule.averages == "late"
    return LocalSteps(at, job, elements, Rule.of(settings), settings.outer_on, late=late)


class LocalSteps(Trainable):
    """A worker's local steps, and the outer update after each ``interval`` of them."""

    engine = "co2"

    def __init__(
        self,
        at: Place,
        job: Job,
        elements: int,
        rule: Rule,
        outer_on: OuterPlace = "device",
        *,
        late: bool,
    ) -> None:
        """``elements``: all that is trained; ``late``: CO2."""
        inside, between = at.loop.closed_form_bytes, at.exchange_bytes / rule.interval
        super().__init__(at.loop.model, job, inside + between)
        self.interval = rule.interval
        self.policy = at.loop.policy
        self._loop = at.loop
        self._phases = at.loop._phases
        self._parts = at.parts
        self._rule = rule
        self._late = late
        self._elements = elements
        self._flat = Flat(trainable_parameters(at.loop.model))
        self._device = torch.device(job.topology.mesh.device_type)
        self._memory = Memory(outer_on, self._flat.numel, _SCALARS, self._device)
        self._flat.copy_to(self._memory.start)
        self._outer = OuterState(self._memory.start, self._memory.momentum)
        self._average = Average(self._memory.snapshot, at.peers)
        #: Steps of this round that are done.
        self._done = 0
        #: Squared norms of the last outer update, and of this round's first local step.
        self._moved = torch.zeros((), device=self._memory.start.device)
        self._first = torch.zeros((), device=self._device)
        #: Of each outer update: its staleness gap, drift between workers, share clipped.
        self._told: list[torch.Tensor] = []

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = self._loop.step(micro_batches)
        self._done += 1
        if self._done == 1:
            self._first = self._first_step()
        if self._done == self.interval:
            self._done = 0
            self._end_round()
        return loss

    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        return self._loop.evaluate(batch)

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        """Bytes inside of the worker alone."""
        return self._loop.take_ledger()

    @property
    def cache(self) -> CacheUse | None:
        return self._loop.cache

    @property
    def host_cache_bytes(self) -> int | None:
        return self._loop.host_cache_bytes

    @torch.no_grad()
    def _first_step(self) -> torch.Tensor:
        return self._flat.squared_distance(self._outer.start)

    @torch.no_grad()
    def _end_round(self) -> None:
        """Send this round's displacement; move on by it, or by that of the round before."""
        rate = float(self._loop.optimizer.param_groups[0]["lr"])
        arrives = self._late and self._average.started
        if arrives:
            self._absorb(rate)
        self._send()
        if not self._late:
            self._absorb(rate)
        if arrives or not self._late:
            moved, clipped = self._outer.move(self._rule, rate)
            self._moved, clipped = self._over_parts(torch.stack((moved, clipped)))
            self._told[-1][2] = clipped / self._elements
        # The first round of CO2 begins anew: its displacement arrives with the second. What FCDP
        # has cached of the parameters is stale already, by the step that has just ended.
        self._flat.copy_from(self._outer.start)

    def _send(self) -> None:
        """Start the exchange of x_{t,0} − x_{t,τ}, and of what tells how far workers went."""
        displacement, scalars = self._split()
        self._flat.copy_to(displacement)
        self._memory.land()
        torch.sub(self._outer.start, displacement, out=displacement)
        first = self._first.to(displacement.device)
        scalars.copy_(torch.stack((displacement.dot(displacement), first)))
        self._average.start()

    def _absorb(self, rate: float) -> None:
        """Take the mean that has arrived into the outer momentum."""
        self._average.wait()
        mean, scalars = self._split()
        known = self._over_parts(torch.cat((scalars, mean.dot(mean)[None])))
        each, first, together = known.unbind()
        gap = torch.ones_like(first)
        if self._late:
            gap = self._rule.staleness(self._moved.sqrt(), first.sqrt())
        drift = ((each - together).clamp(min=0) / each.clamp(min=1e-30)).sqrt()
        self._told.append(torch.stack((gap, drift, torch.zeros_like(gap))))
        self._outer.absorb(self._rule, mean, gap, rate)

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffer's displacement (elements) and scalars."""
        buffer, numel = self._average.buffer, self._flat.numel
        return buffer[:numel], buffer[numel:]

    def _over_parts(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sum scalars over the ranks that one worker is sharded over."""
        if self._parts is None:
            return scalars
        summed = scalars.to(self._device)
        dist.all_reduce(summed, group=self._parts)
        return summed.to(scalars.device)

    def settle(self) -> None:
        self._loop.settle()
        self._average.settle()
        self._memory.land()

    def take_metrics(self) -> dict[str, float]:
        """Means over the outer updates since the last call, if there was one.

        ``staleness_gap``: what late displacements were divided by. ``worker_drift``: how far
        workers are from their mean, relative to how far they went (root mean squares).
        ``clipped_fraction``: share of the outer momentum's elements that were clipped.
        ``outer_host_bytes``: host memory of the outer state and the snapshot, if they lie there.
        """
        held = self._memory.host_bytes
        metrics: dict[str, float] = {"outer_host_bytes": held} if held else {}
        if self._told:
            gap, drift, clipped = torch.stack(self._told).mean(0).tolist()
            self._told.clear()
            metrics |= {"staleness_gap": gap, "worker_drift": drift, "clipped_fraction": clipped}
        return metrics
