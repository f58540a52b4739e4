"""Local SGD, SlowMo, CO2, DiLoCo: several local steps, an outer update by the workers' mean.

Each worker takes τ steps of its own optimizer from a state that all share. Then the workers'
displacements are averaged, and their mean moves the shared state. SlowMo waits for the mean; CO2
starts the exchange, applies the mean of the round before, and trains meanwhile: it never waits if τ
steps take longer than an exchange.

A round of CO2 on one worker, whose state is x (τ = 3)::

    step step step | Δ of the last round arrives; x − x_τ is sent; x ← x − …Δ… | step …

Unlike in the paper's listing, displacements x_{t,0} − x_{t,τ} cross instead of parameters, whose
mean the listing then subtracts from x_{t,0}; so x_{t−1,0} need not be kept. The released code
is not used: that discards the clipped values, and reduces the parameters in training.

DiLoCo (arXiv 2311.08105) is SlowMo with Nesterov's outer step. Streaming DiLoCo (2501.18512) steps
one fragment of the model after another, each some steps after it was sent, and mixes in a share of
the worker's own parameters. Its four-bit coding is left out: fragments cross in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from baselines.part import local_part, restored, views
from baselines.presets import fcdp
from baselines.pytorch.ddp import Replica
from baselines.pytorch.fsdp2 import FSDP2, shard_each
from baselines.schedule import FCDP
from baselines.settings import (
    CacheSettings,
    DiLoCoSettings,
    LocalSGDSettings,
    OuterPlace,
    Penalty,
    StreamingSettings,
    divided,
)
from baselines.strategy import CacheUse, Job, Trainable, numel, trainable_parameters, trained_numel
from fcdp import Topology
from fcdp.arena import Arena, aligned
from fcdp.exchange import Pending, Then, all_reduce

#: Starts the all-reduce that sums a buffer over workers.
AddUp = Callable[[torch.Tensor], Pending | None]


@dataclass(frozen=True)
class Place:
    """One rank's place: what it trains of a worker, and whom it exchanges with."""

    #: The training of one worker, which knows nothing of the others.
    loop: FSDP2
    #: Sums over the ranks with the same part of each worker, one per worker.
    add_up: AddUp
    workers: int
    #: The ranks that this worker is sharded over; ``None``: it is whole on this one.
    parts: dist.ProcessGroup | None
    #: Least bytes that one node sends to other workers when displacements cross once.
    exchange_bytes: float


def place(model: nn.Module, job: Job) -> Place:
    """Put the model under a worker's strategy. Raises ``ValueError`` if workers do not fit."""
    settings, topology, device = job.settings, job.topology, job.topology.mesh.device_type
    assert isinstance(settings, LocalSGDSettings)
    together = settings.nodes_per_worker
    if problem := divided(together, topology.nodes):
        raise ValueError(f"nodes_per_worker = {together}: {problem}")
    # Out and back as sums, in float32; a node has 1/``together`` of a worker.
    elements, workers = trained_numel(model), topology.nodes / together
    exchange = 2 * (workers - 1) / workers * elements / together * 4
    size = 1 if settings.worker == "rank" else together * topology.ranks_per_node
    shape = (topology.world_size // size, size)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("worker", "part"))
    # Nothing else uses these groups: no gather queues behind an exchange, nor the reverse.
    across, parts = mesh["worker"], mesh["part"]
    peers, by_gloo = across.get_group(), device == "cpu"
    if settings.outer_on == "host" and not by_gloo:  # gloo exchanges tensors of the host
        ranks, by_gloo = across.mesh.tolist(), True
        peers = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    add_up: AddUp = partial(dist.all_reduce, group=peers, async_op=True)
    if size == 1 and by_gloo and topology.nodes > 1 and topology.ranks_per_node > 1:
        add_up = _over_nodes(topology)
    loop: FSDP2
    if settings.worker == "rank":
        loop = Replica(model.to(device), job, 0.0)
    elif settings.worker == "node":
        shard_each(model, job, parts)
        loop = FSDP2(model, job, 0.0)
    else:  # what is gathered is cached on the hosts of the worker's own nodes
        inside = Topology.of_mesh(parts, topology.ranks_per_node)
        own = replace(job, topology=inside, schedule=FCDP, settings=CacheSettings())
        loop = fcdp.build(model, own)
    return Place(loop, add_up, peers.size(), parts.get_group() if size > 1 else None, exchange)


def _over_nodes(topology: Topology) -> AddUp:
    """All-reduces on the host, first inside the node and then across, one by one on a thread.

    In gloo's ring over all ranks a node would send nearly the whole buffer twice. The thread ends
    when the function that is returned is collected.
    """
    mesh = init_device_mesh("cpu", (topology.world_size,))
    on_host = Topology.of_mesh(mesh, topology.ranks_per_node)
    thread = ThreadPoolExecutor(1, thread_name_prefix="co2")
    return lambda buffer: Then(thread.submit(all_reduce, buffer, on_host).result)


_ITEM = torch.float32.itemsize
#: Scalars that cross with a displacement: squared norms of it and of the round's first step.
_SCALARS = 2


class Memory:
    """Parameters end to end in three flat float32 tensors: ``start``, ``momentum``, ``snapshot``.

    Sharded parameters are in them as this rank's shards; ``snapshot`` has scalars at its end. Rules
    of access where they lie on the host of an accelerator:

    - copies to and from parameters are queued on the computing stream, so that they come after the
      steps before them and before those after; nothing is queued on any other stream;
    - the host reads or writes ``start`` and ``snapshot`` only once ``land`` has returned, with no
      copy queued since: a round ends with a copy to ``snapshot``, ``land``, all of the host's work,
      and a copy from ``start``, which the next round's ``land`` waits for;
    - ``momentum`` is the host's alone, and ``snapshot`` the all-reduce's while one is under way, on
      threads of gloo or one of ours.

    On the device everything is queued on the computing stream, and the host waits for nothing: an
    all-reduce starts after what is queued, and its ``wait`` orders the stream after it.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], place: OuterPlace, world: int, device: torch.device
    ) -> None:
        """``world``: number of ranks, to a multiple of which the snapshot is padded."""
        self._params = params
        #: Bytes of the host's memory that are taken, page-locked on CUDA; 0 on the device.
        self.host_bytes = 0
        self._device = device
        numel = sum(part.numel() for part in self.parts())
        padding = -(numel + _SCALARS) % world
        sizes = [numel, numel, numel + _SCALARS + padding]
        if place == "device":
            tensors = [torch.zeros(size, device=device) for size in sizes]
        else:
            self.host_bytes = sum(aligned(size * _ITEM) for size in sizes)
            # Its pages are zero at first, as the kernel gives them.
            self._arena = Arena(self.host_bytes, device)
            tensors = [self._arena.take(size * _ITEM).view(torch.float32) for size in sizes]
        self.start, self.momentum, self.snapshot = tensors
        self.displacement, self.scalars, _ = self.snapshot.split([numel, _SCALARS, padding])
        self.copy_to(self.start)

    def land(self) -> None:
        """Wait until the copies that are queued have been made, if the host is to see them."""
        if self.host_bytes and self._device.type != "cpu":
            backend: Any = torch.get_device_module(self._device)
            backend.current_stream().synchronize()

    def copy_to(self, flat: torch.Tensor) -> None:
        """Copy the parameters to ``flat`` (elements); to the host's memory a copy is queued."""
        parts = self.parts()
        torch._foreach_copy_(views(flat, parts), parts, non_blocking=True)

    def restart(self, local_share: float = 0.0) -> None:
        """Copy ``start`` to the parameters; from the host's memory a copy is queued.

        ``local_share`` of their old values stays.
        """
        if not local_share:
            parts = self.parts()
            torch._foreach_copy_(parts, views(self.start, parts), non_blocking=True)
            return
        for part, value in self._from_start():
            part.lerp_(value, 1 - local_share)

    def squared_distance(self) -> torch.Tensor:
        """Sum of squares of the parameters' differences from ``start``, a scalar."""
        return torch.stack([(p - value).square().sum() for p, value in self._from_start()]).sum()

    def _from_start(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter and its start, which is copied to the device, one at a time."""
        parts = self.parts()
        for part, view in zip(parts, views(self.start, parts), strict=True):
            yield part, view.to(part.device, non_blocking=True)

    def parts(self) -> list[torch.Tensor]:
        """Each parameter, or shard, in place."""
        # Not cached: FSDP2 replaces the shards when a model is loaded or moved.
        return [local_part(param).detach() for param in self._params]


@dataclass(frozen=True)
class Rule:
    """Rule by which a round's mean displacement moves the state that all workers start from.

    m ← β·m + Δ/(Λ·γ), x ← x − α·γ·clamp(m, ±φ), with γ = 1 unless ``by_learning_rate``
    (Algorithm 1); with ``nesterov`` x moves by Δ + β·m, as PyTorch's SGD has it. Operations are
    element-wise over flat fp32 tensors, with scalars that are the same on all workers: shards are
    updated apart, and all workers stay equal to the last bit.
    """

    interval: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    by_learning_rate: bool = False
    clip: float | None = None
    penalty: Penalty = "none"

    @classmethod
    def of(cls, settings: LocalSGDSettings) -> Rule:
        """The rule of a strategy's settings; Local SGD goes on from the mean."""
        names = {field.name for field in fields(cls)}
        values = {name.removeprefix("outer_"): value for name, value in settings}
        values = {name: value for name, value in values.items() if name in names}
        return cls(**values, nesterov=isinstance(settings, DiLoCoSettings))

    def scale(self, rate: float) -> float:
        """The factor γ for local steps with the learning rate ``rate``."""
        return rate if self.by_learning_rate else 1.0

    def absorb(
        self, momentum: torch.Tensor, mean: torch.Tensor, gap: torch.Tensor, rate: float
    ) -> torch.Tensor:
        """Take a mean displacement (elements), which is overwritten, into the outer momentum.

        ``gap`` is its staleness, a scalar, and ``rate`` the local steps' learning rate. Returns
        the step of the shared state, which is in the memory of ``momentum`` or ``mean``.
        """
        momentum.mul_(self.momentum).add_(mean.div_(gap * self.scale(rate)))
        return mean.add_(momentum, alpha=self.momentum) if self.nesterov else momentum

    def move(
        self, start: torch.Tensor, by: torch.Tensor, rate: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move the shared state by what ``absorb`` gave.

        Returns two scalars: the squared norm of the move, and how many elements were clipped.
        """
        clipped = torch.zeros((), device=by.device)
        if self.clip is not None:
            clipped = (by.abs() > self.clip).sum().float()
            by = by.clamp(-self.clip, self.clip)
        move = by * (self.learning_rate * self.scale(rate))
        start.sub_(move)
        return move.dot(move), clipped

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


def _fragments(model: nn.Module, job: Job, count: int) -> list[list[nn.Parameter]]:
    """Split trained parameters into ``count`` parts: blocks in turn, the rest to the smallest.

    Raises ``ValueError`` where there are fewer blocks.
    """
    if count == 1:
        return [trainable_parameters(model)]
    blocks = [trainable_parameters(block) for block in job.blocks]
    if count > len(blocks):
        raise ValueError(f"fragments = {count}: allowed are 1 to {len(blocks)}, the model's blocks")
    parts = [[param for block in blocks[at::count] for param in block] for at in range(count)]
    inside = {id(param) for part in parts for param in part}
    rest = [param for param in trainable_parameters(model) if id(param) not in inside]
    min(parts, key=numel).extend(rest)
    return parts


class Fragment:
    """Parameters that workers exchange together, their shared start, and the mean under way.

    Its displacement is sent every ``interval`` steps. The mean is waited for, arrives at the end of
    the next round, or, streamed, is mixed into the parameters ``overlap`` steps after it was sent.
    """

    def __init__(self, params: Sequence[nn.Parameter], at: Place, job: Job, done: int = 0) -> None:
        """``done``: steps that the first round leaves out."""
        settings = job.settings
        assert isinstance(settings, LocalSGDSettings)
        self._rule = Rule.of(settings)
        self._arrives = job.schedule.averages
        #: Steps from sending to the mean's arrival, and the local parameters' share that stays.
        self._overlap, self._local_share = settings.interval, 0.0
        if isinstance(settings, StreamingSettings):
            self._overlap, self._local_share = settings.overlap, settings.kept
        self._at = at
        self._elements = numel(params)
        world, self._device = job.topology.world_size, torch.device(job.topology.mesh.device_type)
        self.memory = Memory(params, settings.outer_on, world, self._device)
        #: Step of the shared state, with which the next round starts.
        self._by = self.memory.momentum
        #: The all-reduce of the snapshot, until its sum is taken.
        self._work: Pending | None = None
        #: Steps since the last displacement was sent.
        self._done = done
        #: Squared norms of the last outer update, and of this round's first local step.
        self._moved = torch.zeros((), device=self.memory.start.device)
        self._first = torch.zeros((), device=self._device)
        #: Staleness gap, drift between workers and share clipped of each outer update.
        self.update_metrics: list[torch.Tensor] = []

    @torch.no_grad()
    def end_step(self, rate: float) -> None:
        """Exchange what is due after a local step with the learning rate ``rate``."""
        self._done += 1
        if self._done == 1 and self._rule.penalty != "none":
            self._first = self.memory.squared_distance()
        arrived = self._work is not None and self._done == self._overlap
        if arrived:
            self._absorb(rate)
            if self._arrives == "streamed":
                self._move(rate)
                self.memory.restart(self._local_share)
        if self._done < self._rule.interval:
            return
        self._done = 0
        self._send()
        if self._arrives == "waited":
            self._absorb(rate)
        if self._arrives == "streamed":
            return
        # CO2's first round ends where it began: its displacement arrives with the second. FCDP's
        # cached parameters are stale already, by the step that has just ended.
        if arrived or self._arrives == "waited":
            self._move(rate)
        self.memory.restart()

    def _move(self, rate: float) -> None:
        moved, clipped = self._rule.move(self.memory.start, self._by, rate)
        self._moved, clipped = self._over_parts(torch.stack((moved, clipped)))
        self.update_metrics[-1][2] = clipped / self._elements

    def _send(self) -> None:
        """Start the exchange of x_{t,0} − x_{t,τ}, and of the squared norms."""
        displacement = self.memory.displacement
        self.memory.copy_to(displacement)
        self.memory.land()
        torch.sub(self.memory.start, displacement, out=displacement)
        first = self._first.to(displacement.device)
        self.memory.scalars.copy_(torch.stack((displacement.dot(displacement), first)))
        assert self._work is None, "the last sum has not been taken"
        self._work = self._at.add_up(self.memory.snapshot)

    def _absorb(self, rate: float) -> None:
        """Take the mean that has arrived into the outer momentum."""
        assert self._work is not None, "nothing has been sent"
        self._work.wait()
        self._work = None
        self.memory.snapshot.div_(self._at.workers)
        mean = self.memory.displacement
        scalars = self._over_parts(torch.cat((self.memory.scalars, mean.dot(mean)[None])))
        mean_square, first_square, square_of_mean = scalars.unbind()
        gap = torch.ones_like(first_square)
        if self._arrives == "late":
            gap = self._rule.staleness(self._moved.sqrt(), first_square.sqrt())
        drift = ((mean_square - square_of_mean).clamp(min=0) / mean_square.clamp(min=1e-30)).sqrt()
        self.update_metrics.append(torch.stack((gap, drift, torch.zeros_like(gap))))
        self._by = self._rule.absorb(self.memory.momentum, mean, gap, rate)

    def _over_parts(self, scalars: torch.Tensor) -> torch.Tensor:
        """Sum scalars over the ranks that one worker is sharded over."""
        if self._at.parts is None:
            return scalars
        summed = scalars.to(self._device)
        dist.all_reduce(summed, group=self._at.parts)
        return summed.to(scalars.device)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In the body, give the parameters the values that all workers start from."""
        with restored(self.memory.parts()):
            self.memory.restart()
            self.memory.land()
            yield

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._work is not None:
            self._work.wait()
        self.memory.land()


class LocalSteps(Trainable):
    """A worker's local steps, and the outer update after each ``interval`` of them."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        at, settings = place(model, job), job.settings
        assert isinstance(settings, LocalSGDSettings)
        interval = settings.interval
        inside, between = at.loop.closed_form_bytes, at.exchange_bytes / interval
        super().__init__(at.loop.model, job, inside + between)
        self.interval = interval
        self.policy = at.loop.policy
        self._loop = at.loop
        self._seconds = at.loop._seconds
        count = settings.fragments if isinstance(settings, StreamingSettings) else 1
        parts = _fragments(at.loop.model, job, count)
        # They cross at equal intervals, the last one at the end of a round.
        self._fragments = [
            Fragment(params, at, job, interval - (index + 1) * interval // count)
            for index, params in enumerate(parts)
        ]

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        loss = self._loop.step(micro_batches)
        rate = float(self._loop.optimizer.param_groups[0]["lr"])
        for fragment in self._fragments:
            fragment.end_step(rate)
        return loss

    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Measure the shared state, which all workers but streaming ones have after a round."""
        with torch.no_grad(), ExitStack() as shared:
            if self.job.schedule.averages == "streamed":
                for fragment in self._fragments:
                    shared.enter_context(fragment.shared())
            return self._loop.evaluate(batch)

    def take_ledger(self) -> dict[str, dict[str, float]] | None:
        """Bytes inside the worker, without exchanges between workers."""
        return self._loop.take_ledger()

    @property
    def cache(self) -> CacheUse | None:
        return self._loop.cache

    def settle(self) -> None:
        self._loop.settle()
        for fragment in self._fragments:
            fragment.settle()

    def take_metrics(self) -> dict[str, float]:
        """Means over the outer updates since the last call, if there was one.

        ``staleness_gap``: what late displacements were divided by. ``worker_drift``: how far
        workers are from their mean, relative to how far they went (root mean squares).
        ``clipped_fraction``: share of the outer momentum's elements that were clipped.
        ``outer_host_bytes``: host memory of the outer state and the snapshot, if they lie there.
        """
        held = sum(fragment.memory.host_bytes for fragment in self._fragments)
        metrics: dict[str, float] = {"outer_host_bytes": held} if held else {}
        per_update = [each for fragment in self._fragments for each in fragment.update_metrics]
        if per_update:
            gap, drift, clipped = torch.stack(per_update).mean(0).tolist()
            for fragment in self._fragments:
                fragment.update_metrics.clear()
            metrics |= {"staleness_gap": gap, "worker_drift": drift, "clipped_fraction": clipped}
        return metrics
