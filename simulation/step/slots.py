"""Cycles, slot by slot: ranks two slots apart, or a rank's micro-batches that take turns.

Ranks send the messages of ``baselines.cyclic.routes``, and do not do the same at the same time. All
of them are simulated event by event, as ``baselines.cyclic.ring`` runs them: each goes through its
slots in order, sends without waiting, waits for what a slot needs, and is ready to receive one
message ahead. They start at once and come to be two slots apart; one of the later steps is shown,
of the last rank of the node that sends most.

Micro-batches take turns as in ``baselines.cyclic.interleaved``: in a slot each that is under way
goes through one stage, forwards first. Steps overlap: a steady step is the slots from the start of
its first micro-batch to that of the next step's, with all that happens in them.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Literal

from baselines.cyclic.routes import Kind, Message, backward_slot, forward_slot, slots_per_step
from simulation import traffic
from simulation.cycle import cycle_of, stages_of
from simulation.hardware import Hardware
from simulation.step.schedule import StageSeconds, adding_seconds
from simulation.step.tasks import COMPUTE, Span, Task, Tasks, Timeline, simulate, used
from simulation.workload import FP32, Workload

#: Steps that are simulated; the first that is steady; the one that is shown, with what follows it
#: under way.
_STEPS, _STEADY, _SHOWN = 10, 4, 8
#: Phases of messages, as a record's ledger names them.
_PHASES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "reduce",
    "sum": "reduce",
}
#: Kind, step, rank and slot or stage of an action: computation, a stage's update, a message.
Key = tuple[Literal["slot", "update", Kind], int, int, int]
#: A stage's new version is a copy that is stepped: read and written once.
_COPY_BYTES = 8


@dataclass
class Slots(Tasks):
    """All ranks over several steps; its tasks are one rank's in one steady step."""

    workload: Workload = field(kw_only=True)

    def __post_init__(self) -> None:
        stages = stages_of(self.workload, self.hardware.world_size)
        self._cycle = cycle_of(self.workload, stages, self.hardware.world_size)
        self._seconds = StageSeconds.of(self.workload, stages, self.hardware)
        self._sizes = stages.sizes(twice=self._cycle.twice)
        self._messages = [m for m in self._cycle.messages() if m.source != m.target]
        #: Messages by kind, stage and source; those that each rank receives, in their order.
        self._sends = {(m.kind, m.stage, m.source): m for m in self._messages}
        self._received = [self._cycle.received_by(rank) for rank in range(self._cycle.ranks)]
        self._last = 2 * self._cycle.stages - 1
        self.tasks = [self._own(self._task(key))._replace(after=()) for key in self._keys_shown()]
        for message in self._sent():
            link = "inter_node" if self._crosses(message) else "intra_node"
            self.count(link, _PHASES[message.kind], self._nbytes(message))

    # Ranks and messages that are shown.

    @cached_property
    def _shown_node(self) -> int:
        """The node that sends most."""
        sent = [0.0] * self.hardware.nodes
        for message in filter(self._crosses, self._messages):
            sent[self._node(message.source)] += self._nbytes(message)
        return sent.index(max(sent))

    @property
    def _shown_rank(self) -> int:
        """The rank that is shown, whose neighbour is on another node."""
        return (self._shown_node + 1) * self.hardware.ranks_per_node - 1

    def _sent(self) -> list[Message]:
        """Messages that the node sends in a step, inside of it too."""
        return [m for m in self._messages if self._node(m.source) == self._shown_node]

    def _crosses(self, message: Message) -> bool:
        return self._node(message.source) != self._node(message.target)

    def _nbytes(self, message: Message) -> float:
        return float(FP32 * self._sizes[message.kind][message.stage])

    def _node(self, rank: int) -> int:
        return rank // self.hardware.ranks_per_node

    def _keys_shown(self) -> list[Key]:
        step, rank = _SHOWN, self._shown_rank
        messages = [_key(message, step) for message in self._sent()]
        updates = [("update", step, rank, stage) for stage in self._owned(rank)]
        slots = [("slot", step, rank, slot) for slot in range(self._last + 1)]
        return [*messages, *updates, *slots]  # type: ignore[list-item]

    def _owned(self, rank: int) -> list[int]:
        return [s for s in range(self._cycle.stages) if self._cycle.owner(s) == rank]

    def _own(self, task: Task, *, counted: bool = True) -> Task:
        """Keep only the task's demands on the rank that is shown, and on its node's link.

        Tasks of other ranks, or of another step, are not ``counted``.
        """
        mine = {f"inter_node {self._shown_node}": "inter_node"}
        for name in ("compute", "host_to_device", "device_to_host"):
            mine[f"{name} {self._shown_rank}"] = name
        taken = task.demands.items() if counted else ()
        shown = {mine[name]: took for name, took in taken if name in mine}
        stream = COMPUTE if task.stream == f"rank {self._shown_rank}" else task.stream
        return task._replace(stream=stream, demands=shown)

    # Order: who waits for whom. A key whose step is not simulated waits for nothing.

    def _past(self, step: int, rank: int, slot: int) -> list[Key]:
        """Tasks that have ended when a rank has done with a slot; −1: with the step before."""
        if slot < 0:
            step, slot = step - 1, self._last
        keys: list[Key] = [("slot", step, rank, slot)]
        if slot >= self._cycle.stages:  # it waits for the gradients that it adds to
            keys += self._arrived(step, "gradient", self._last - slot, rank)
        return keys

    def _arrived(self, step: int, kind: Kind, stage: int, rank: int) -> list[Key]:
        """Tasks that end before a rank has a message in its step; nothing if it gets none."""
        message = self._received[rank].get((kind, stage))
        if message is None:
            return []
        sent = step - message.later
        if message.source == rank:  # the sum is made where it is needed
            return self._past(sent, rank, self._last - stage)
        return [_key(message, sent)]

    def _has(self, step: int, rank: int, stage: int) -> list[Key]:
        """Tasks that have to end for a rank to have a stage's parameters in forward."""
        if self._cycle.owner(stage) == rank:
            return [("update", step, rank, stage)]
        return self._arrived(step, "forward", stage, rank)

    def _taken(self, step: int, kind: Kind, stage: int, rank: int) -> list[Key]:
        """Tasks that end before a rank waits for a message."""
        if kind == "gradient":
            return [("slot", step, rank, self._last - stage)]
        return self._past(step, rank, (self._last - stage if kind == "backward" else stage) - 1)

    def _ready(self, message: Message, step: int) -> list[Key]:
        """Tasks that end before the target can receive: when it waits for the message before."""
        order = [*self._received[message.target]]
        at = order.index((message.kind, message.stage))
        kind, stage = order[at - 1]
        return self._taken(step + message.later - (at == 0), kind, stage, message.target)

    def _after(self, key: Key) -> list[Key]:
        what, step, rank, number = key
        if what == "update":
            summed = self._arrived(step, "sum", number, rank)
            return [*self._past(step, rank, number - 1), *summed]
        if what == "slot":
            before = self._past(step, rank, number - 1)
            if number < self._cycle.stages:
                return [*before, *self._has(step, rank, number)]
            return [*before, *self._arrived(step, "backward", self._last - number, rank)]
        message = self._sends[what, number, rank]
        ready = self._ready(message, step)
        if what == "forward":
            return [*self._past(step, rank, number - 1), *self._has(step, rank, number), *ready]
        slot = self._last - number
        if what == "backward":
            again = self._arrived(step, "backward", number, rank)
            return [*self._past(step, rank, slot - 1), *again, *ready]
        return [*self._past(step, rank, slot), *ready]

    # Durations.

    def _task(self, key: Key) -> Task:
        what, _, rank, number = key
        if what == "slot":
            stage, forward = number, number < self._cycle.stages
            if not forward:
                stage = self._last - number
            seconds = (self._seconds.forward if forward else self._seconds.backward)[stage]
            name = f"{'forward' if forward else 'backward'} stage {stage}"
            return Task(name, f"rank {rank}", used({f"compute {rank}": seconds}))
        if what == "update":
            taken = used({f"compute {rank}": self._seconds.update[number]})
            return Task(f"optimizer stage {number}", f"rank {rank}", taken)
        return self._sending(self._sends[what, number, rank])

    def _sending(self, message: Message) -> Task:
        """A message on its way: through the kernel, or out of and into devices' memory."""
        hardware, nbytes = self.hardware, self._nbytes(message)
        source, target, overheads = message.source, message.target, self.hardware.overheads
        sharing = hardware.ranks_sharing_device
        taken = {
            f"compute {source}": overheads.message_seconds
            + sharing * overheads.byte_seconds * nbytes,
            f"compute {target}": sharing * overheads.gathered_byte_seconds * nbytes,
        }
        latency = hardware.intra_latency_seconds
        if self._crosses(message):
            taken[f"inter_node {self._node(source)}"] = nbytes / hardware.inter_bytes_per_s
            latency = hardware.inter_latency_seconds
        if hardware.backend == "nccl":  # gloo sends host memory
            taken[f"device_to_host {source}"] = nbytes / hardware.device_to_host_bytes_per_s
            taken[f"host_to_device {target}"] = nbytes / hardware.host_to_device_bytes_per_s
        name = f"{message.kind} stage {message.stage} from {source} to {target}"
        stream = f"{message.kind} {source} to {target}"
        return Task(name, stream, used(taken), latency_seconds=latency)

    # The simulation.

    def timeline(self) -> Timeline:
        """Tasks of the rank that is shown, for the mean time of a step, and what they wait for.

        They are cut out of the simulation of all ranks, at the end of the step that is shown.
        """
        tasks, at = self._tasks()
        whole = simulate(tasks)
        last = at["slot", _SHOWN, self._shown_rank, self._last]
        end = whole.spans[last].end
        # The mean: where ranks wait for messages, a long step and a short one can alternate.
        steady = whole.spans[at["slot", _STEADY, self._shown_rank, self._last]].end
        begin = end - (end - steady) / (_SHOWN - _STEADY)
        indices = [at[key] for key in self._keys_shown()]
        coming = [m for m in self._messages if m.target == self._shown_rank]
        comes = {at[_key(m, _SHOWN - m.later)] for m in coming}
        waits = {*_path(whole, last, begin), *comes, *indices} - {last}
        # A message from the same node may be of the step before: it is received once per step.
        counted = {*indices} - {at[_key(m, _SHOWN)] for m in coming} | comes
        # In the order of all tasks, so that of two that end at once the same is waited for; the
        # rank's own slot is the last.
        shown = [*sorted(waits), last]
        number = {index: place for place, index in enumerate(shown)}
        return Timeline(
            tuple(self._own(tasks[index], counted=index in counted) for index in shown),
            tuple(_within(whole.spans[index], begin, end) for index in shown),
            [tuple(number[i] for i in whole.before[index] if i in number) for index in shown],
        )

    def _tasks(self) -> tuple[list[Task], dict[Key, int]]:
        """The tasks of all steps, and where each key's is.

        A message's latency is a task before it, on a stream of its own: messages of one stream
        follow one another on the link, and are on their way at the same time.
        """
        tasks: list[Task] = []
        at: dict[Key, int] = {}
        for key in self._ordered():
            after = tuple(at[k] for k in self._after(key) if k in at)
            task = self._task(key)
            if task.latency_seconds:
                way = f"{task.name}, on its way"
                tasks.append(Task(way, way, {}, after, task.latency_seconds))
                task, after = task._replace(latency_seconds=0.0), (len(tasks) - 1,)
            at[key] = len(tasks)
            tasks.append(task._replace(after=after))
        return tasks, at

    def _ordered(self) -> list[Key]:
        """All keys, each behind those that it waits for, else by the schedule's clock."""
        clocks = {key: self._clock(key) for step in range(_STEPS) for key in self._keys(step)}
        sorter = TopologicalSorter({k: set(self._after(k)) & clocks.keys() for k in clocks})
        sorter.prepare()
        ready: list[tuple[int, Key]] = []
        ordered: list[Key] = []
        while sorter.is_active():
            for key in sorter.get_ready():
                heapq.heappush(ready, (clocks[key], key))
            _, key = heapq.heappop(ready)
            ordered.append(key)
            sorter.done(key)
        return ordered

    def _keys(self, step: int) -> Iterable[Key]:
        for rank in range(self._cycle.ranks):
            yield from (("slot", step, rank, slot) for slot in range(self._last + 1))
            # Before the first step nothing is due.
            yield from (("update", step, rank, stage) for stage in self._owned(rank) if step)
        yield from (_key(message, step) for message in self._messages)

    def _clock(self, key: Key) -> int:
        what, step, rank, number = key
        slot = forward_slot(rank, number)
        if what not in ("slot", "update", "forward"):
            slot = backward_slot(rank, number, self._cycle.stages)
        return 2 * self._cycle.ranks * step + slot


def _path(timeline: Timeline, last: int, begin: float) -> list[int]:
    """Tasks that a task waits for, back to the moment ``begin``, on whatever rank."""
    path = [last]
    while timeline.spans[path[-1]].start > begin:
        before = timeline.before[path[-1]]
        path.append(max(before, key=lambda index: (timeline.spans[index].end, index)))
    return path


def _key(message: Message, step: int) -> Key:
    return (message.kind, step, message.source, message.stage)


def _within(span: Span, begin: float, end: float) -> Span:
    """A span in seconds from ``begin``, cut at both ends."""
    return Span(*(min(max(moment, begin), end) - begin for moment in span))


def in_slot(slot: int, stages: int, micro_batches: int) -> list[tuple[int, int]]:
    """The micro-batches that are under way in a steady step's slot, each with its phase.

    A phase below ``stages`` is that stage's forward; of the others the first is the last stage's
    backward.
    """
    period = slots_per_step(micro_batches)
    phases = [(index, (slot - 2 * index) % period) for index in range(micro_batches)]
    return [(index, phase) for index, phase in phases if phase < 2 * stages]


def turns(workload: Workload, hardware: Hardware) -> Tasks:
    """The tasks of one steady step. Raises ``ValueError`` as ``stages_of``."""
    stages, tasks = stages_of(workload, hardware.world_size), Tasks(hardware)
    seconds = StageSeconds.of(workload, stages, hardware)
    count, micro_batches = len(stages), workload.accumulation
    adding = adding_seconds(workload, hardware) / max(1, workload.trained)
    for slot in range(slots_per_step(micro_batches)):
        there = in_slot(slot, count, micro_batches)
        forward = sum(seconds.forward[phase] for _, phase in there if phase < count)
        tasks.compute(f"forward slot {slot}", forward, ())
        for index, phase in there:
            if phase < count:
                continue
            stage = 2 * count - 1 - phase
            title = f"backward slot {slot} micro-batch {index}"
            added = adding * stages.trained[stage]  # the first micro-batch's too, to zeros
            tasks.compute(title, seconds.backward[stage] + added, ())
            if index == micro_batches - 1:
                _update(tasks, stage, stages.trained[stage], seconds.update[stage])
    return tasks


def _update(tasks: Tasks, stage: int, trained: int, seconds: float) -> None:
    """Append what follows a stage's last gradients: their sum over ranks, and a new version."""
    hardware = tasks.hardware
    if hardware.world_size > 1 and trained:
        nbytes = float(FP32 * trained)
        ring, name = traffic.flat(nbytes, *hardware.shape), f"reduce stage {stage}"
        whole = traffic.all_reduce(ring)
        tasks.exchange(name, COMPUTE, whole, "reduce", (), reduced_bytes=nbytes)
    copy = _COPY_BYTES * trained / hardware.rates.copied_bytes_per_s
    tasks.compute(f"optimizer stage {stage}", seconds + copy, ())
