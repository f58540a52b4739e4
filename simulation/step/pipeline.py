"""One step of a pipeline as tasks: each group's actions in their order, and its messages.

A group computes one action at a time, on a stream of its own, and sends on another, in whose order
messages queue on the link of its nodes. An action waits for its message. Gathers and reductions
inside a group are beside the pass that they are for, which takes as long as the busiest of its
resources; what is reduced once per step is a task of its own, as the schedules have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

from baselines.pipeline.order import Action, Kind, ahead, order
from baselines.settings import PipelineSchedule
from simulation.hardware import Hardware, Work
from simulation.memory import Tiers
from simulation.pipeline import Pipeline
from simulation.step.schedule import (
    adam_seconds,
    adding_seconds,
    block_seconds,
    call_seconds,
)
from simulation.step.tasks import COMPUTE, Task, Tasks, used
from simulation.traffic import Exchanges, Traffic, all_reduce, inter_node, total
from simulation.units import Unit
from simulation.workload import FP32, Workload, head_work

#: Bytes of a token's number, which all stages get, as masks are made where they are used.
_TOKEN_BYTES = 4
#: Schedules that wait for each message before they go on.
_WAIT_FOR_SENDS = ("1f1b",)
#: Directions of messages.
Phase = Literal["forward", "backward"]


@dataclass(frozen=True, eq=False)
class PassWork:
    """The work of a group's nodes in a pass through a stage, in a message or in a reduction."""

    #: Seconds that each resource needs for it alone.
    demands: Mapping[str, float]
    latency_seconds: float = 0.0
    #: Bytes that one node moves, by link and phase.
    moved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def seconds(self, sharing: int) -> float:
        """Seconds that it takes alone, where so many groups share their devices."""
        alone = (of / sharing if name == "compute" else of for name, of in self.demands.items())
        return self.latency_seconds + max(alone, default=0.0)


@dataclass(frozen=True)
class StageWork:
    """The work of a stage on its nodes, while all of the cluster computes."""

    #: Passes of a micro-batch by their kind, and the forward of the first one.
    passes: Mapping[Kind, PassWork]
    first: PassWork
    #: Reductions after all micro-batches, and the seconds of the optimizer's step.
    reductions: Sequence[PassWork] = ()
    step_seconds: float = 0.0
    #: The gathers of a later stage across its nodes while its first activation is under way.
    ahead: PassWork | None = None
    #: Messages with a micro-batch's activations to the next stage, and with gradients back.
    sends: Mapping[Phase, PassWork] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineWork:
    """The work of a pipeline's step: all that its events depend on."""

    hardware: Hardware
    schedule: PipelineSchedule
    groups: int
    micro_batches: int
    #: In the order of forward; those that are alike may be one.
    stages: Sequence[StageWork]
    #: The all-reduce of gradients of embeddings that both ends have, if they do.
    tied: PassWork | None = None
    #: Bytes of tokens that each group sends; they take no time to speak of.
    token_bytes: float = 0.0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Groups, stages of each, and micro-batches."""
        return self.groups, len(self.stages) // self.groups, self.micro_batches

    @property
    def sharing(self) -> int:
        """The number of groups that share their devices."""
        return self.groups if self.hardware.nodes_share_device else 1

    def end_seconds(self, group: int) -> float:
        """Seconds in which a group reduces and steps at the end."""
        own = self.stages[group :: self.groups]
        works = [work for stage in own for work in stage.reductions]
        if self.tied is not None and group in (0, self.groups - 1):
            works.append(self.tied)
        steps = sum(stage.step_seconds for stage in own) / self.sharing
        return steps + sum(work.seconds(self.sharing) for work in works)


def work_of(pipeline: Pipeline) -> PipelineWork:
    """The work of a step of this pipeline."""
    workload, hardware = pipeline.workload, pipeline.hardware
    made: dict[int, StageWork] = {}
    for at, part in enumerate(pipeline.stages):
        # The last one alone has a head, and the first one embeddings: alike are those in between.
        if id(part) not in made:
            made[id(part)] = _stage(pipeline, at)
    tied = None
    if pipeline.tied_bytes:
        traffic = all_reduce(inter_node(pipeline.tied_bytes, 2))
        tied = exchange_work(traffic, hardware, "reduce")
    sequences = hardware.ranks_per_node * workload.accumulation * workload.micro_batch
    tokens = sequences * (workload.sequence_length + 1)
    return PipelineWork(
        hardware,
        workload.pipeline_schedule,
        pipeline.groups,
        pipeline.micro_batches,
        [made[id(part)] for part in pipeline.stages],
        tied,
        float(_TOKEN_BYTES * tokens * (pipeline.groups - 1)),
    )


def exchange_work(
    traffic: Traffic, hardware: Hardware, phase: str, touched: float = 0.0
) -> PassWork:
    """The work of an exchange beside no pass; a reduction's input has so many bytes ``touched``."""
    work = _Beside(traffic, reduced_bytes=touched).work(hardware, phase, 0.0)
    return replace(work, latency_seconds=traffic.latency_seconds(hardware))


class _Beside(NamedTuple):
    """Exchanges and copies of a pass through a stage, beside its computation."""

    traffic: Traffic = Traffic()
    gathered_bytes: float = 0.0
    reduced_bytes: float = 0.0
    #: Bytes that a rank copies, by link.
    copies: Mapping[str, float] = {}

    def work(self, hardware: Hardware, phase: str, seconds: float) -> PassWork:
        """The work of a pass beside this, which computes so many seconds."""
        tasks = Tasks(hardware)
        taken, _ = tasks.exchanged(self.traffic, phase, self.gathered_bytes, self.reduced_bytes)
        demands = dict(taken)
        for link, nbytes in self.copies.items():
            demands[link] = demands.get(link, 0.0) + tasks.copied(link, nbytes, phase)
        demands["compute"] = demands.get("compute", 0.0) + seconds
        return PassWork(used(demands), moved=tasks.moved_bytes)


_NOTHING = _Beside()


def _stage(pipeline: Pipeline, at: int) -> StageWork:
    workload, hardware, nodes = pipeline.stages[at], pipeline.hardware, pipeline.of_stage
    units, tiers, _ = pipeline.placed(at)
    exchanges = Exchanges(workload, nodes)
    gathers = partial(_gathers, exchanges, tiers)
    kept = workload.schedule.gathered_for == "step"
    trained = sum(unit.trained for unit in units.units)
    reductions = exchanges.reduce(trained, last=True)
    touched = float(trained * workload.reduced_bytes)
    in_forward = in_backward = again = _NOTHING
    if not kept:
        in_forward = gathers(units.units, first=False)
        again = gathers([unit for unit in units.units if not unit.stays_gathered], first=False)
        # By each micro-batch, inside its nodes or across them too, and what is left at the end.
        waits = workload.schedule.accumulates_without_sync
        reduced, reductions = reductions[: 1 if waits else None], reductions[1:] if waits else []
        copies = dict(again.copies)
        if pipeline.sums_on_host(at):
            for link in ("host_to_device", "device_to_host"):
                of_sums = FP32 * trained / nodes.ranks_per_node
                copies[link] = copies.get(link, 0.0) + of_sums
        in_backward = _Beside(
            total([again.traffic, *reduced]), again.gathered_bytes, touched, copies
        )
    blocks = {id(part): block_seconds(part, hardware) for part in workload.parts}
    forward = workload.total(lambda each: blocks[id(each)][0])
    backward = workload.total(lambda each: blocks[id(each)][1])
    if at == len(pipeline.stages) - 1:
        of_head = [hardware.seconds(work * workload.tokens) for work in head_work(workload)]
        forward, backward = forward + of_head[0], backward + of_head[1]
    # A mean micro-batch's, as the first has none before it.
    adding = (1 - 1 / pipeline.micro_batches) * adding_seconds(workload, nodes)
    backward += adding
    whole = in_backward.work(hardware, "backward", backward)
    halves = PassWork({}), PassWork({})
    if pipeline.workload.pipeline_schedule == "zb":
        halves = PassWork({}), whole  # PyTorch's first stage has nothing to hand back
        if at:  # zero bubble gathers for both of its parts, and reduces after the second
            weights = hardware.seconds(_of_weights(workload) * workload.tokens) + adding
            halves = (
                again.work(hardware, "backward", backward - weights),
                in_backward.work(hardware, "backward", weights),
            )
    first, ahead_of_it = gathers(units.units, first=True), None
    if at and first.traffic.inter_node_bytes:
        first, ahead_of_it = in_forward, first.work(hardware, "forward", 0.0)
    calls = workload.model.layers * call_seconds(workload, hardware)
    nbytes = hardware.ranks_per_node * pipeline.message_bytes
    message = Traffic(inter_node_bytes=nbytes, inter_messages=1)
    phases: Sequence[Phase] = get_args(Phase)
    return StageWork(
        {
            "forward": in_forward.work(hardware, "forward", forward),
            "backward": whole,
            "activations": halves[0],
            "weights": halves[1],
        },
        first.work(hardware, "forward", forward),
        [exchange_work(each, hardware, "reduce", touched * kept) for each in reductions if trained],
        calls + adam_seconds(workload, workload.trained / nodes.world_size, hardware),
        ahead_of_it,
        {phase: exchange_work(message, hardware, phase) for phase in phases},
    )


def _gathers(exchanges: Exchanges, tiers: Tiers, units: Sequence[Unit], *, first: bool) -> _Beside:
    """Gather units: across nodes those that the optimizer has changed, else from the cache."""
    known: dict[tuple[int, int, bool], Sequence[Traffic]] = {}  # most units are alike
    sent, copies = list[Traffic](), dict[str, float]()
    for unit in units:
        tier = tiers.get(unit)
        stale = tier is None or (first and unit.trained > 0)
        alike = unit.gathered, unit.trained, stale
        if alike not in known:
            known[alike] = exchanges.gather(unit) if stale else [exchanges.spread(unit)]
        sent += known[alike]
        if tier == "host":
            link = "device_to_host" if stale else "host_to_device"
            copies[link] = copies.get(link, 0.0) + exchanges.slice_bytes(unit)
    return _Beside(total(sent), sum(map(exchanges.gathered_bytes, units)), copies=copies)


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
    #: Demands of prepared work on these resources.
    own: dict[PassWork, Mapping[str, float]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        stream: str,
        demands: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float = 0.0,
    ) -> int:
        own = self._shared(demands)
        return super().add(name, f"{stream} {self.index}", own, after, latency_seconds)

    def put(self, name: str, stream: str, work: PassWork, after: Sequence[int]) -> int:
        """Append prepared work, and count its bytes."""
        for link, phases in work.moved.items():
            for phase, nbytes in phases.items():
                self.count(link, phase, nbytes)
        if work not in self.own:
            self.own[work] = self._shared(work.demands)
        task = Task(
            name, f"{stream} {self.index}", self.own[work], tuple(after), work.latency_seconds
        )
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _shared(self, demands: Mapping[str, float]) -> Mapping[str, float]:
        """Demands on the group's own resources, or on devices that all groups share."""
        own = {f"{resource} {self.index}": seconds for resource, seconds in demands.items()}
        if self.sharing > 1:
            own["compute"] = own.pop(f"compute {self.index}", 0.0) / self.sharing
        return used(own)


class Stages(Tasks):
    """All groups in one steady step; ``moved_bytes`` are those of the node that sends most."""

    def __init__(self, work: PipelineWork) -> None:
        super().__init__(work.hardware)
        self._work, self._stages = work, work.stages
        self._groups = [
            _Group(self.hardware, self.tasks, index=index, sharing=work.sharing)
            for index in range(work.groups)
        ]
        for group in self._groups:
            group.count("inter_node", "forward", work.token_bytes)
        #: The task that brings each action its input.
        self._arrives: dict[Action, int] = {}
        orders = (order(work.schedule, group, *work.sizes) for group in range(work.groups))
        waiting = [actions[::-1] for actions in orders]
        while any(waiting):
            done = len(self.tasks)
            for group, actions in zip(self._groups, waiting, strict=True):
                while actions and self._is_ready(actions[-1]):
                    self._act(group, actions.pop())
            assert len(self.tasks) > done, "PyTorch's schedules do not hang"
        self._end()
        moved = [group.moved_bytes for group in self._groups]
        self.moved_bytes = max(moved, key=lambda of: sum(of.get("inter_node", {}).values()))

    def _is_ready(self, action: Action) -> bool:
        kind, stage, _ = action
        own = kind == "weights" or stage == (0 if kind == "forward" else len(self._stages) - 1)
        return own or action in self._arrives

    def _act(self, group: _Group, action: Action) -> None:
        """Append an action of a group, and the message with what it hands on."""
        kind, stage, batch = action
        of, to = self._stages[stage], stage + (1 if kind == "forward" else -1)
        work = of.passes[kind]
        after = [*group.before, *([self._arrives[action]] if action in self._arrives else [])]
        if kind == "forward" and batch == 0:
            work = of.first
            if of.ahead is not None:
                title = f"gather stage {stage}"
                after.append(group.put(title, f"gather {stage}", of.ahead, ()))
        title = f"{kind} stage {stage} micro-batch {batch}"
        at = group.latest = group.put(title, COMPUTE, work, after)
        group.before = []
        if kind == "weights" or not 0 <= to < len(self._stages):
            return
        if len(self._groups) > 1:
            message = of.sends["forward" if kind == "forward" else "backward"]
            self._send(group, f"{title} sent", message, [at], (kind, to, batch))
        else:
            self._arrives[kind, to, batch] = at

    def _send(
        self, group: _Group, title: str, message: PassWork, after: Sequence[int], to: Action
    ) -> None:
        """Append the message that brings the action ``to`` its input, once tasks have ended."""
        self._arrives[to] = at = group.put(title, "send", message, after)
        if self._work.schedule in _WAIT_FOR_SENDS:
            group.before = [at]

    def _end(self) -> None:
        """Append what groups reduce once per step, and their optimizers' steps."""
        stages = [self._stages[group.index :: len(self._groups)] for group in self._groups]
        for group, own in zip(self._groups, stages, strict=True):
            group.before = [*group.before, group.latest]
            for work in (each for stage in own for each in stage.reductions):
                at = group.put(f"reduce group {group.index}", COMPUTE, work, group.before)
                group.before = [at]
        if (tied := self._work.tied) is not None:
            ends = self._groups[0], self._groups[-1]
            both = [task for group in ends for task in group.before]
            for group in ends:
                group.before = [group.put("tied embeddings", COMPUTE, tied, both)]
        for group, own in zip(self._groups, stages, strict=True):
            seconds = sum(stage.step_seconds for stage in own)
            group.compute(f"optimizer group {group.index}", seconds, group.before)


class DeepSpeedStages(Stages):
    """1F1B in the order of DeepSpeed's ``TrainSchedule``, with one stage per group.

    An activation that is followed by a backward leaves once the gradient for that backward has
    come, so that one micro-batch less is under way. As in the base class a stage goes on when its
    message is sent; whether the other stage waits for it yet is not looked at.
    """

    def __init__(self, work: PipelineWork) -> None:
        assert (work.schedule, len(work.stages)) == ("1f1b", work.groups), "all that it is made for"
        #: The activation that each group sends next. Set first: the base class appends all tasks.
        self._held: dict[int, tuple[str, PassWork, Sequence[int], Action]] = {}
        super().__init__(work)

    def _act(self, group: _Group, action: Action) -> None:
        if group.index in self._held:
            title, message, after, to = self._held.pop(group.index)
            super()._send(group, title, message, [*after, self._arrives[action]], to)
        super()._act(group, action)

    def _send(
        self, group: _Group, title: str, message: PassWork, after: Sequence[int], to: Action
    ) -> None:
        kind, stage, batch = to
        # Those before fill the pipeline: no backward follows them at once.
        if kind == "forward" and batch >= len(self._stages) - stage:
            self._held[group.index] = title, message, after, to
        else:
            super()._send(group, title, message, after, to)


def least_seconds(work: PipelineWork) -> float:
    """Seconds of a step that no overlap of its actions and messages undercuts.

    A group begins when the first micro-batch has come through the stages before its own. Then it
    computes its actions one after the other, sends its messages one after the other, and uses each
    link for as long as all of them need it. So many micro-batches are under way at most, each of
    them for a round trip through the stages that follow. What a group hands back last goes through
    the stages before, and then the first group steps.
    """
    name, stages, sharing = work.schedule, work.stages, work.sharing
    groups, per_group, batches = work.sizes
    kinds: tuple[Kind, ...] = "forward", "activations" if name == "zb" else "backward", "weights"
    forward, backward, weights = (
        [stage.passes[kind].seconds(sharing) for stage in stages] for kind in kinds
    )
    first = [stage.first.seconds(sharing) for stage in stages]
    #: Messages of each stage, forward and back; none from the last, to the first, or in a group.
    messages: list[dict[Phase, PassWork]] = [{} for _ in stages]
    for at, stage in enumerate(stages if groups > 1 else ()):
        if at < len(stages) - 1:
            messages[at]["forward"] = stage.sends["forward"]
        if at:
            messages[at]["backward"] = stage.sends["backward"]
    phases: Sequence[Phase] = get_args(Phase)
    on, back = (
        [of[phase].seconds(sharing) if phase in of else 0.0 for of in messages] for phase in phases
    )
    least = begin = 0.0
    #: A round trip from this group on; and what comes after a group has handed back the last.
    trip = sum(map(sum, (forward, backward, on, back)))
    trip -= sum(max(0.0, usual - one) for usual, one in zip(forward, first, strict=True))
    after = weights[0] + work.end_seconds(0)
    for group in range(groups):
        own, gather = slice(group, None, groups), stages[group].ahead
        begin = max(begin, 0.0 if gather is None else gather.seconds(sharing))
        once = [sum(each[own]) for each in (forward, backward, weights)]
        computed = batches * sum(once) + sum(first[own]) - once[0]
        # Zero bubble hands the last activations' gradients back before these gradients of weights.
        late = min(batches, group + 1)
        left = late * weights[group]
        least = max(least, begin + computed + work.end_seconds(group))
        least = max(least, begin + computed - left + after)
        busy = defaultdict[str, float](float)
        for stage, sends in zip(stages[own], messages[own], strict=True):
            several = [*(stage.passes[kind] for kind in kinds), *sends.values()]
            counted = [(stage.first, 1), (stage.passes["forward"], -1)]
            for each, count in (*counted, *((each, batches) for each in several)):
                for resource, needed in each.demands.items():
                    busy[resource] += count * needed
        for resource, needed in stages[group].passes["weights"].demands.items():
            busy[resource] -= late * needed
        busy.pop("compute", None)
        # The last message goes back, but from the first group.
        rest = after - back[group]
        least = max(least, begin + max(busy.values(), default=0.0) + rest)
        least = max(least, begin + first[group] + batches * sum(on[own] + back[own]) + rest)
        if per_group == 1:
            under_way = 1 + ahead(name, group, *work.sizes)
            rounds, more = divmod(batches - 1, under_way)
            least = max(least, begin + (rounds + 1) * trip + more * backward[group] + after)
        begin += first[group] + on[group]
        trip -= forward[group] + backward[group] + on[group]
        if group + 1 < len(stages):
            trip -= back[group + 1]
            after += backward[group] + back[group + 1]
    return least
