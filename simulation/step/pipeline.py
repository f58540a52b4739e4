"""One step of a pipeline as tasks: each group's actions in their order, and its messages.

A group computes one action at a time, on a stream of its own, and sends on another, in whose order
messages queue on the link of its nodes. An action waits for its message. Gathers and reductions
inside a group are beside the pass that they are for, which takes as long as the busiest of its
resources; what is reduced once per step is a task of its own, as the schedules have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baselines.pipeline.order import Action, Kind
from simulation.hardware import Work
from simulation.pipeline import Pipeline
from simulation.step.schedule import adam_seconds, block_seconds, call_seconds
from simulation.step.tasks import COMPUTE, Tasks
from simulation.traffic import Exchanges, Traffic, all_reduce, inter_node
from simulation.units import Unit
from simulation.workload import FP32, Workload, head_work

#: Bytes of a token's number, which all stages get, as masks are made where they are used.
_TOKEN_BYTES = 4
#: Schedules that wait for each message before they go on.
_WAIT_FOR_SENDS = ("1f1b",)


class _Beside(NamedTuple):
    """Exchanges and copies of a pass through a stage, beside its computation."""

    traffic: Traffic = Traffic()
    gathered_bytes: float = 0.0
    reduced_bytes: float = 0.0
    #: Bytes that a rank copies, by link.
    copies: Mapping[str, float] = {}


_NOTHING = _Beside()


class _Stage:
    """A stage on its nodes, while all of the cluster computes."""

    def __init__(self, pipeline: Pipeline, at: int) -> None:
        self._workload = workload = pipeline.stages[at]
        hardware, nodes = pipeline.hardware, pipeline.of_stage
        units, self._tiers, _ = pipeline.placed(at)
        self._exchanges = Exchanges(workload, nodes)
        kept = workload.schedule.gathered_for == "step"
        trained = sum(unit.trained for unit in units.units)
        reductions = self._exchanges.reduce(trained, last=True)
        touched = float(trained * workload.reduced_bytes)
        #: Gathers of a micro-batch's forward, of the first and of others; what backward does.
        self.first = self._gathers(units.units, first=True)
        self.forward = _NOTHING if kept else self._gathers(units.units, first=False)
        self.backward = _NOTHING
        if not kept:
            again = self._gathers([u for u in units.units if not u.stays_gathered], first=False)
            inside, *reductions = reductions
            copies = dict(again.copies)
            if pipeline.sums_on_host(at):
                for link in ("host_to_device", "device_to_host"):
                    of_sums = FP32 * trained / nodes.ranks_per_node
                    copies[link] = copies.get(link, 0.0) + of_sums
            self.backward = _Beside(again.traffic + inside, again.gathered_bytes, touched, copies)
        #: Reductions when all micro-batches have ended, with the bytes that each touches.
        self.reductions = [(each, touched * kept) for each in reductions if trained]
        forward = workload.total(lambda each: block_seconds(each, hardware)[0])
        backward = workload.total(lambda each: block_seconds(each, hardware)[1])
        if at == len(pipeline.stages) - 1:
            of_head = [hardware.seconds(work * workload.tokens) for work in head_work(workload)]
            forward, backward = forward + of_head[0], backward + of_head[1]
        weights = 0.0
        if pipeline.workload.pipeline_schedule == "zb":
            weights = hardware.seconds(_of_weights(workload) * workload.tokens)
        self.seconds: Mapping[Kind, float] = {
            "forward": forward,
            "backward": backward,
            "activations": backward - weights,
            "weights": weights,
        }
        calls = workload.model.layers * call_seconds(workload, hardware)
        self.update = calls + adam_seconds(workload, workload.trained / nodes.world_size, hardware)

    def _gathers(self, units: Sequence[Unit], *, first: bool) -> _Beside:
        """Gather units: across nodes those that the optimizer has changed, else from the cache."""
        traffic, copies = Traffic(), dict[str, float]()
        for unit in units:
            tier = self._tiers.get(unit)
            stale = tier is None or (first and unit.trained > 0)
            exchanges = self._exchanges.gather(unit) if stale else [self._exchanges.spread(unit)]
            for each in exchanges:
                traffic += each
            if tier == "host":
                link = "device_to_host" if stale else "host_to_device"
                copies[link] = copies.get(link, 0.0) + self._exchanges.slice_bytes(unit)
        whole = sum(self._exchanges.gathered_bytes(unit) for unit in units)
        return _Beside(traffic, whole, copies=copies)


def _of_weights(workload: Workload) -> Work:
    """One token's gradients of a stage's trained matrices."""
    trained = float(workload.adapters)
    if workload.lora is None:
        matrices = workload.total(lambda each: sum(m.active_weights for m in each.model.matrices))
        trained = matrices + workload.model.head_flops / 2
    return Work(2 * trained, 2 * trained)


@dataclass
class _Group(Tasks):
    """The tasks of one group's nodes, on streams and resources of their own, among all tasks."""

    index: int = field(kw_only=True)
    #: Groups that share their devices: one that waits leaves them to the others.
    sharing: int = field(kw_only=True)
    #: Tasks that the next action waits for, and the last action.
    before: list[int] = field(default_factory=list)
    latest: int = -1

    def add(
        self,
        name: str,
        stream: str,
        demands: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float = 0.0,
    ) -> int:
        own = {f"{resource} {self.index}": used for resource, used in demands.items()}
        if self.sharing > 1:
            own["compute"] = own.pop(f"compute {self.index}", 0.0) / self.sharing
        return super().add(name, f"{stream} {self.index}", own, after, latency_seconds)

    def demands(self, beside: _Beside, phase: str) -> dict[str, float]:
        """The seconds that a pass's exchanges and copies need; their bytes are counted."""
        if beside == _NOTHING:
            return {}
        traffic, gathered, reduced, copies = beside
        needed = dict(self.exchanged(traffic, phase, gathered, reduced))
        for link, nbytes in copies.items():
            needed[link] = needed.get(link, 0.0) + self.copied(link, nbytes, phase)
        return needed


class Stages(Tasks):
    """All groups in one steady step; ``moved_bytes`` are those of the node that sends most."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline.hardware)
        self._pipeline = pipeline
        self._stages = [_Stage(pipeline, at) for at in range(len(pipeline.stages))]
        self._ranks = pipeline.hardware.ranks_per_node
        sharing = pipeline.groups if self.hardware.nodes_share_device else 1
        self._groups = [
            _Group(self.hardware, self.tasks, index=index, sharing=sharing)
            for index in range(pipeline.groups)
        ]
        #: The task that brings each action its input.
        self._arrives: dict[Action, int] = {}
        self._share_tokens()
        waiting = [order[::-1] for order in pipeline.orders]
        while any(waiting):
            done = len(self.tasks)
            for group, order in zip(self._groups, waiting, strict=True):
                while order and self._is_ready(order[-1]):
                    self._act(group, order.pop())
            assert len(self.tasks) > done, "PyTorch's schedules do not hang"
        self._end()
        moved = [group.moved_bytes for group in self._groups]
        self.moved_bytes = max(moved, key=lambda of: sum(of.get("inter_node", {}).values()))

    def _share_tokens(self) -> None:
        """Count the tokens that each group sends the others; they take no time to speak of."""
        workload, others = self._pipeline.workload, self._pipeline.groups - 1
        sequences = self._ranks * workload.accumulation * workload.micro_batch
        nbytes = float(_TOKEN_BYTES * sequences * (workload.sequence_length + 1))
        for group in self._groups:
            group.count("inter_node", "forward", others * nbytes)

    def _is_ready(self, action: Action) -> bool:
        kind, stage, _ = action
        own = kind == "weights" or stage == (0 if kind == "forward" else len(self._stages) - 1)
        return own or action in self._arrives

    def _act(self, group: _Group, action: Action) -> None:
        """Append an action of a group, and the message with what it hands on."""
        kind, stage, batch = action
        of, forward = self._stages[stage], kind == "forward"
        phase, to = ("forward", stage + 1) if forward else ("backward", stage - 1)
        beside = of.forward if forward else of.backward if kind != "weights" else _NOTHING
        after = [*group.before, *([self._arrives[action]] if action in self._arrives else [])]
        if forward and batch == 0 and stage and of.first.traffic.inter_node_bytes:
            # A later stage gathers across its nodes while its first activation is under way.
            title, ahead = f"gather stage {stage}", group.demands(of.first, phase)
            after.append(group.add(title, f"gather {stage}", ahead, ()))
        elif forward and batch == 0:
            beside = of.first
        demands = group.demands(beside, phase)
        demands["compute"] = demands.get("compute", 0.0) + of.seconds[kind]
        title = f"{kind} stage {stage} micro-batch {batch}"
        at = group.latest = group.add(title, COMPUTE, demands, after)
        group.before = []
        if kind == "weights" or not 0 <= to < len(self._stages):
            return
        if len(self._groups) > 1:
            nbytes = self._ranks * self._pipeline.message_bytes
            message = Traffic(inter_node_bytes=nbytes, inter_messages=1)
            at = group.exchange(f"{title} sent", "send", message, phase, (at,))
            if self._pipeline.workload.pipeline_schedule in _WAIT_FOR_SENDS:
                group.before = [at]
        self._arrives[kind, to, batch] = at

    def _end(self) -> None:
        """Append what groups reduce once per step, and their optimizers' steps."""
        stages = [self._stages[group.index :: len(self._groups)] for group in self._groups]
        for group, own in zip(self._groups, stages, strict=True):
            title, after = f"reduce group {group.index}", [*group.before, group.latest]
            for traffic, touched in (each for stage in own for each in stage.reductions):
                at = group.exchange(title, COMPUTE, traffic, "reduce", after, 0.0, touched)
                after = [at]
            group.before = after
        if tied_bytes := self._pipeline.tied_bytes:
            ends = self._groups[0], self._groups[-1]
            both = [task for group in ends for task in group.before]
            traffic = all_reduce(inter_node(tied_bytes, 2))
            for group in ends:
                at = group.exchange("tied embeddings", COMPUTE, traffic, "reduce", both)
                group.before = [at]
        for group, own in zip(self._groups, stages, strict=True):
            seconds = sum(stage.update for stage in own)
            group.compute(f"optimizer group {group.index}", seconds, group.before)
