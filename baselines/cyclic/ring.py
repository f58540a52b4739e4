"""The executor of Cyclic Data Parallelism: ranks two slots apart, and no collective in a step.

Each rank takes its micro-batch through the stages, forward and back; ``baselines.cyclic.routes``
says who sends what to whom meanwhile, and why nobody waits for ever. In each slot a rank sends the
parameters of one stage (forward) or its gradients (backward). The optimizers of stages lie with
their owners, one rank each. ``ring`` keeps all parameters on each rank; ``zero`` keeps a block's
only for the slot that computes with them, as ZeRO-3 does, and sends them on once more in backward.

A new version arrives where the rule needs it, neither before nor after, so that each rank computes
with what it would have in ``baselines.cyclic.synchronous``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from baselines.cyclic import routes
from baselines.cyclic.routes import KINDS, Cycle, Kind, Message
from baselines.cyclic.stages import Segments, Staged, chosen_runs, parameters
from baselines.part import Part, restored, split, take_gradients, views
from baselines.settings import CyclicSettings
from baselines.strategy import Job, make_optimizer, numel


class Stage:
    """One stage's parameters: ``resident`` ones stay in memory, ``passed`` ones may be freed."""

    def __init__(self, resident: Part, passed: Part) -> None:
        self.resident = resident
        self.passed = passed

    @property
    def params(self) -> list[nn.Parameter]:
        return [*self.resident.params, *self.passed.params]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.requires_grad]

    def values(self) -> torch.Tensor:
        return torch.cat((self.resident.values(), self.passed.values()))

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        resident, passed = values.split((self.resident.numel, self.passed.numel))
        self.resident.fill(resident)
        self.passed.fill(passed)


class Owned:
    """The newest parameters of the stage that this rank owns, and their optimizer."""

    def __init__(self, stage: Stage, job: Job) -> None:
        #: All elements end to end, as messages have them.
        self.newest = stage.values()
        newest = zip(stage.params, views(self.newest, stage.params), strict=True)
        self._params = [nn.Parameter(view) for param, view in newest if param.requires_grad]
        self._optimizer = make_optimizer(self._params, job)

    def update(self, gradients: torch.Tensor) -> None:
        """Step by the mean gradients of all ranks, end to end; messages come on the host."""
        gradients = gradients.to(self.newest.device)
        for param, grad in zip(self._params, views(gradients, self._params), strict=True):
            param.grad = grad
        self._optimizer.step()
        self._optimizer.zero_grad()


Key = tuple[Kind, int]


class Post:
    """Messages that one rank sends and receives, by gloo, in float32."""

    def __init__(self, cycle: Cycle, sizes: Mapping[Kind, Sequence[int]], rank: int) -> None:
        """``sizes``: elements of each stage's messages."""
        #: Messages that this rank sends, and those that it receives in the order of a step.
        self.sends = cycle.sent_by(rank)
        self.receives = cycle.received_by(rank)
        self._sizes = sizes
        self._rank = rank
        #: Slots from the start of a step to that of the next.
        self._period = 2 * cycle.ranks
        #: Steps that are done; below 0 before the first.
        self.step = 0
        order = [*self.receives]
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self.group = dist.new_group(backend="gloo")
        #: Messages being received, or received and not taken yet.
        self._coming: dict[Key, tuple[torch.Tensor, Any]] = {}
        #: Messages being sent, whose memory must stay until they are, and the slot that needs each.
        self._going: list[tuple[int, torch.Tensor, Any, Message]] = []

    def send(self, kind: Kind, stage: int, tensor: torch.Tensor) -> int:
        """Begin to send ``tensor``, which nobody writes any more; return the bytes sent.

        Nothing is sent where the rank itself is the target.
        """
        message = self.sends[kind, stage]
        held = tensor.to("cpu")
        if message.target == self._rank:
            self._coming[kind, stage] = (held, None)
            return 0
        start = self.step * self._period
        if self.step >= 0:  # before the first step nobody receives yet
            self.settle(start + message.sent)
        if held.numel():
            work = dist.isend(held, group=self.group, group_dst=message.target, tag=_tag(message))
            self._going.append((start + message.needed, held, work, message))
        return held.nbytes

    def take(self, kind: Kind, stage: int) -> torch.Tensor:
        """Wait for a message; begin to receive the one that is needed after it.

        Raises ``RuntimeError`` where it does not come.
        """
        self.expect(kind, stage)
        self.expect(*self._next[kind, stage])
        self.land(kind, stage)
        return self._coming.pop((kind, stage))[0]

    def expect(self, kind: Kind, stage: int) -> None:
        """Begin to receive a message, if that has not begun."""
        message = self.receives[kind, stage]
        if (kind, stage) in self._coming or message.source == self._rank:
            return
        buffer = torch.empty(self._sizes[kind][stage])
        work = None
        if buffer.numel():
            work = dist.irecv(buffer, group=self.group, group_src=message.source, tag=_tag(message))
        self._coming[kind, stage] = (buffer, work)

    def land(self, kind: Kind, stage: int) -> torch.Tensor:
        """Wait for a message, and leave it to be taken."""
        self.expect(kind, stage)
        buffer, work = self._coming[kind, stage]
        if work is not None:
            _wait(work, "did not come from", self.receives[kind, stage].source, kind, stage)
            self._coming[kind, stage] = (buffer, None)
        return buffer

    def settle(self, slot: float = math.inf) -> None:
        """Wait until all messages that slots before ``slot`` need have been received.

        Only a wait tells that gloo is done with a buffer. Waiting for earlier slots alone makes no
        cycle of waits.
        """
        for needed, _, work, message in self._going:
            if needed < slot:
                _wait(work, "did not reach", message.target, message.kind, message.stage)
        self._going = [entry for entry in self._going if entry[0] >= slot]


_WORDS: dict[Kind, str] = {
    "forward": "parameters for forward",
    "backward": "parameters for backward",
    "gradient": "gradients",
    "sum": "sum of gradients",
}


def _wait(work: Any, what: str, rank: int, kind: Kind, stage: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"stage {stage}'s {_WORDS[kind]} {what} rank {rank}: it has ended, or hangs"
        ) from error


def _tag(message: Message) -> int:
    return message.stage * len(KINDS) + KINDS.index(message.kind)


def _stages(model: nn.Module, job: Job, runs: Sequence[range]) -> list[Stage]:
    """Put the model on the device, and its parameters into stages of these runs of blocks."""
    device, zero = torch.device(job.topology.mesh.device_type), job.schedule.cycle == "zero"
    model.to(device)
    stages = []
    for params in parameters(model, job.blocks, runs, frozen=zero):
        # As FSDP2's root does, what is outside of the blocks stays from forward to backward.
        resident, passed = split(params, job.blocks) if zero else (params, [])
        stages.append(Stage(Part(resident, device), Part(passed, device)))
    return stages


class Executor(Staged):
    """One rank of the cycle, which is one micro-batch."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        """Put the model under ``ring`` or ``zero``, as the schedule says.

        Raises ``ValueError`` for more stages than blocks or ranks, and for several micro-batches.
        """
        settings, topology, zero = job.settings, job.topology, job.schedule.cycle == "zero"
        assert isinstance(settings, CyclicSettings)
        if job.accumulation != 1:
            raise ValueError(
                f"accumulation = {job.accumulation}: allowed is 1, as each rank is one micro-batch"
            )
        runs = chosen_runs(settings.stages, job.blocks, topology.world_size, "ranks")
        stages = _stages(model, job, runs)
        cycle = Cycle(settings.rule, topology.world_size, len(runs), zero)
        sizes: dict[Kind, list[int]] = {
            "forward": [numel(stage.params) for stage in stages],
            "backward": [stage.passed.numel for stage in stages],
            "gradient": [numel(stage.trained) for stage in stages],
            "sum": [numel(stage.trained) for stage in stages],
        }
        crossing = routes.crossing(cycle, sizes, topology.ranks_per_node, topology.nodes)
        super().__init__(model, job, crossing * torch.float32.itemsize, runs)
        self._cycle = cycle
        self._rank = topology.rank
        self._stages = stages
        indices = [index for index in range(cycle.stages) if cycle.owner(index) == self._rank]
        self._owned = {index: Owned(stages[index], job) for index in indices}
        #: Owned stages whose last gradients are not applied yet.
        self._due: set[int] = set()
        self._post = Post(cycle, sizes, self._rank)
        self._segments: Segments | None = None
        #: Bytes sent since the last ``take_metrics`` in each slot of this rank, and over how many
        #: steps.
        self._sent = [0] * (2 * cycle.stages)
        self._steps = 0
        self._send_first()
        for index in range(cycle.stages):
            self._let_go(index)

    def _send_first(self) -> None:
        """Send the messages that a step before the first would have sent."""
        self._post.step = -1
        for (kind, index), message in self._post.sends.items():
            if message.later and kind != "sum":
                stage = self._stages[index]
                start = 0 if kind == "forward" else stage.resident.numel
                self._post.send(kind, index, stage.values()[start:])
        self._post.step = 0

    def step(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Take one micro-batch through all stages; return its loss."""
        (batch,) = micro_batches
        last = self._cycle.stages - 1
        self._segments = segments = Segments()
        with self._timed("forward"), self.casting():
            self._enter("forward", 0)
            loss = self.job.loss(self.model, batch)
            self._let_go(last)
        self._segments = None
        segments.loss = loss / self._cycle.ranks
        with self._timed("backward"):
            for index in range(last, -1, -1):
                self._backward(index, segments)
        self._due.update(self._owned)
        self._post.step += 1
        self._steps += 1
        return loss.detach()

    def _next_stage(self, index: int, inputs: Any) -> Any:
        """Go from one stage's forward to the next, whose inputs are detached."""
        if self._segments is None:  # an evaluation
            return inputs
        self._let_go(index - 1)
        self._enter("forward", index)
        return self._segments.cut(index, inputs)

    def _enter(self, kind: Kind, index: int) -> None:
        """Take a stage's parameters for forward, or again for backward, and pass them on."""
        stage, forward = self._stages[index], kind == "forward"
        if owned := self._owned.get(index):
            if forward:
                self._renew(index)
            start = 0 if forward else stage.resident.numel
            self._send(kind, index, owned.newest[start:].clone())
        else:
            message = self._post.take(kind, index)
            self._send(kind, index, message)
            (stage if forward else stage.passed).fill(message)

    def _renew(self, index: int) -> None:
        """Update this rank's stage, and compute with the new parameters, or by v1 with the old."""
        if index not in self._due:
            return
        self._due.discard(index)
        owned = self._owned[index]
        late = self._cycle.lag(self._rank, index)
        if late:
            self._stages[index].fill(owned.newest)
        owned.update(self._post.take("sum", index))
        if not late:
            self._stages[index].fill(owned.newest)

    def _backward(self, index: int, segments: Segments) -> None:
        """Backward of a stage; add its gradients to those received, and send them on."""
        if self._cycle.twice:
            self._enter("backward", index)
        adds = ("gradient", index) in self._post.receives
        if adds:
            self._post.expect("gradient", index)
        segments.backward(index)
        total = take_gradients(self._stages[index].trained)
        if adds:
            total += self._post.take("gradient", index).to(total.device)
        last = self._rank == self._cycle.ranks - 1
        self._send("sum" if last else "gradient", index, total)
        self._let_go(index)

    def _let_go(self, index: int) -> None:
        """Free parameters that are received again before they are needed: those of other owners."""
        if index not in self._owned:
            self._stages[index].passed.free()

    def _send(self, kind: Kind, index: int, values: torch.Tensor) -> None:
        if (kind, index) in self._post.sends:
            forward = kind == "forward"
            slot = index if forward else 2 * self._cycle.stages - 1 - index
            self._sent[slot] += self._post.send(kind, index, values)

    def settle(self) -> None:
        """Receive the messages under way, which the next step's slots or updates will need."""
        for (kind, index), message in self._post.receives.items():
            if message.later and (kind != "sum" or index in self._due):
                self._post.land(kind, index)
        self._post.settle()

    def take_metrics(self) -> Mapping[str, float | list[float]]:
        """Return the bytes sent in each slot of a step: means over steps, maxima over ranks."""
        if not self._steps:
            return {}
        self.settle()
        sent = torch.tensor(self._sent, dtype=torch.float64) / self._steps
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=self._post.group)
        self._sent = [0] * len(self._sent)
        self._steps = 0
        return {"bytes_by_slot": sent.tolist()}

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean loss with the mean of the parameters that ranks have next."""
        self.settle()
        for index in self._owned:
            self._renew(index)
        parts = [part for stage in self._stages for part in (stage.resident, stage.passed)]
        with restored([part.values() for part in parts if part.is_there]):
            for index, stage in enumerate(self._stages):
                stage.fill(self._mean(index))
            measured = super().evaluate(batch)
            for index in range(self._cycle.stages):
                self._let_go(index)
        return measured

    def _mean(self, index: int) -> torch.Tensor:
        """The mean of what all ranks compute a stage with in the next step.

        Its owner has the newest, and the first rank has received what those before the owner need.
        """
        owner = self._cycle.owner(index)
        newest = self._shared(owner, lambda: self._stages[index].values(), index)
        if (stale := self._cycle.stale(index)) in (0, 1):
            return newest
        before = self._shared(0, lambda: self._post.land("forward", index), index)
        return torch.lerp(newest, before, stale)

    def _shared(self, source: int, values: Callable[[], torch.Tensor], index: int) -> torch.Tensor:
        """Broadcast a rank's ``values``."""
        shape = numel(self._stages[index].params)
        tensor = values().to("cpu", copy=True) if source == self._rank else torch.empty(shape)
        dist.broadcast(tensor, group_src=source, group=self._post.group)
        return tensor
