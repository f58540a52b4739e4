"""Tasks on shared resources, and their simulation event by event: exact and deterministic.

A task waits for the tasks that it comes after and for the one before it on its stream. Then its
latency passes, and then it makes progress as fast as its resources allow. Each resource can be
used for one second per second; tasks that want more than there is share it max-min fairly.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from simulation.hardware import Hardware
from simulation.traffic import Traffic

#: Share of a task below which what is left of it is rounding.
_DONE = 1e-9
#: Stream of what stops the host's one thread, or the device.
COMPUTE = "compute"


class Task(NamedTuple):
    """A piece of a step's work, on one stream. ``after`` are indices of earlier tasks."""

    name: str
    #: Tasks of one stream run one after the other, in the order of the list.
    stream: str
    #: Seconds that each resource needs for it alone; it uses them at the same time.
    demands: Mapping[str, float]
    after: tuple[int, ...] = ()
    #: Seconds before, which no resource notices.
    latency_seconds: float = 0.0


class Span(NamedTuple):
    """When a task ran, in seconds."""

    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Outcome of a simulation: all tasks' spans, in the order of the tasks."""

    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]
    #: The tasks that each has waited for.
    before: tuple[frozenset[int], ...]

    @cached_property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    def busy_seconds(self) -> dict[str, float]:
        """Seconds of full use of each resource that any task uses."""
        return busy_seconds(self.tasks)

    def since(self, begin: int) -> Timeline:
        """The tasks from this one on, and time from when all before it have ended."""
        if not begin:
            return self
        base = max(span.end for span in self.spans[:begin])
        return Timeline(
            self.tasks[begin:],
            tuple(Span(span.start - base, span.end - base) for span in self.spans[begin:]),
            tuple(
                frozenset(index - begin for index in group if index >= begin)
                for group in self.before[begin:]
            ),
        )

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indices of the tasks that follow one another without a gap up to the last to end."""
        if not self.tasks:
            return ()
        before = self.before
        index = max(range(len(self.tasks)), key=lambda i: (self.spans[i].end, i))
        path = [index]
        while before[index]:
            index = max(before[index], key=lambda i: (self.spans[i].end, i))
            path.append(index)
        return tuple(path[::-1])


@dataclass
class _Active:
    """A task whose latency has passed."""

    index: int
    #: Share of each resource that it would use alone.
    uses: Mapping[str, float]
    #: Counts the kinds of uses, so that sets of tasks that run together are told apart fast.
    kind: int
    alone_seconds: float
    left: float
    speed: float = 0.0


@dataclass
class _Kinds:
    """Kinds of tasks by what they use, and the speeds of sets of them: a step's repeat."""

    numbers: dict[tuple[tuple[str, float], ...], int] = field(default_factory=dict)
    #: Uses of resources by demands, the kind of these, and seconds where a task is alone.
    seen: dict[tuple[tuple[str, float], ...], tuple[dict[str, float], int, float]] = field(
        default_factory=dict
    )
    speeds: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def activated(self, index: int, task: Task) -> _Active:
        demands = tuple(task.demands.items())
        if demands not in self.seen:
            alone = max(task.demands.values(), default=0.0)
            uses = {name: used / alone for name, used in demands if used > _DONE * alone}
            kind = self.numbers.setdefault(tuple(uses.items()), len(self.numbers))
            self.seen[demands] = uses, kind, alone
        uses, kind, alone = self.seen[demands]
        return _Active(index, uses, kind, alone, left=1.0 if alone > 0 else 0.0)

    def share(self, running: Sequence[_Active]) -> None:
        """Set each task's speed."""
        kinds = tuple(task.kind for task in running)
        if kinds not in self.speeds:
            _share(running)
            self.speeds[kinds] = [task.speed for task in running]
        for task, speed in zip(running, self.speeds[kinds], strict=True):
            task.speed = speed


@dataclass
class _State:
    now: float = 0.0
    running: list[_Active] = field(default_factory=list)
    #: Ends of latencies, with the tasks.
    waiting: list[tuple[float, int]] = field(default_factory=list)


def busy_seconds(tasks: Iterable[Task]) -> dict[str, float]:
    """Seconds of full use of each resource that any of the tasks uses."""
    busy: dict[str, float] = {}
    for task in tasks:
        for resource, seconds in task.demands.items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    return busy


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Let the tasks run from time 0, each once all that it waits for has ended."""
    before = _predecessors(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(group) for group in before]
    for index, group in enumerate(before):
        for earlier in group:
            followers[earlier].append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    state, kinds = _State(), _Kinds()
    ready = [index for index, count in enumerate(missing) if count == 0]
    changed = True
    while True:
        for index in ready:
            starts[index] = state.now
            heapq.heappush(state.waiting, (state.now + tasks[index].latency_seconds, index))
        ready = []
        while state.waiting and state.waiting[0][0] <= state.now:
            _, index = heapq.heappop(state.waiting)
            state.running.append(kinds.activated(index, tasks[index]))
            changed = True
        if not state.running and not state.waiting:
            break
        if changed:
            kinds.share(state.running)
        finished = _advance(state)
        changed = bool(finished)
        for index in finished:
            ends[index] = state.now
            for follower in followers[index]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
    assert not any(missing), "tasks wait for one another in a circle"
    spans = tuple(Span(start, end) for start, end in zip(starts, ends, strict=True))
    return Timeline(tuple(tasks), spans, before)


def _predecessors(tasks: Sequence[Task]) -> tuple[frozenset[int], ...]:
    """Indices of the tasks that each waits for: its dependencies, and the last on its stream."""
    latest: dict[str, int] = {}
    groups = []
    for index, task in enumerate(tasks):
        last = latest.get(task.stream)
        group = frozenset(task.after if last is None else (*task.after, last))
        assert max(group, default=-1) < index, f"{task.name}: comes after a later task"
        latest[task.stream] = index
        groups.append(group)
    return tuple(groups)


def _share(running: Sequence[_Active]) -> None:
    """Set each task's speed (1: as if alone), max-min fair.

    All speeds rise together until a resource is full; what uses it stays there, the rest go on.
    """
    for task in running:
        task.speed = 0.0
    rising = list(running)
    free: dict[str, float] = {name: 1.0 for task in running for name in task.uses}
    level = 0.0
    while rising:
        wanted: dict[str, float] = {}
        for task in rising:
            for name, use in task.uses.items():
                wanted[name] = wanted.get(name, 0.0) + use
        step = min((free[name] / use for name, use in wanted.items()), default=1.0)
        step = min(step, 1.0 - level)
        level += step
        for name, use in wanted.items():
            free[name] -= step * use
        full = {name for name in wanted if free[name] <= _DONE}
        for task in rising:
            task.speed = level
        if level >= 1.0 - _DONE:
            return
        rising = [task for task in rising if not full & set(task.uses)]


def _advance(state: _State) -> list[int]:
    """Let time pass until a task ends or a latency does; return the tasks that end."""
    durations = [
        task.left * task.alone_seconds / task.speed if task.left > 0 else 0.0
        for task in state.running
    ]
    step = min(durations, default=float("inf"))
    if state.waiting:
        step = min(step, state.waiting[0][0] - state.now)
    finished, running = [], []
    for task, seconds in zip(state.running, durations, strict=True):
        if seconds <= step * (1 + _DONE):
            finished.append(task.index)
            continue
        task.left -= step * task.speed / task.alone_seconds
        running.append(task)
    state.running = running
    at_latency = state.waiting and state.waiting[0][0] - state.now <= step
    state.now = state.waiting[0][0] if at_latency else state.now + step
    return finished


@dataclass
class Tasks:
    """The tasks so far, and the bytes that they move: one node's, by link and phase."""

    hardware: Hardware
    tasks: list[Task] = field(default_factory=list)
    moved_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Times of exchanges that are alike, as those of all blocks are.
    _exchanges: dict[tuple[Traffic, float, float], tuple[dict[str, float], float]] = field(
        default_factory=dict
    )

    def timeline(self) -> Timeline:
        """The step, event by event."""
        return simulate(self.tasks)

    def compute(self, name: str, seconds: float, after: Sequence[int]) -> int:
        """Append a rank's computation; returns its index, as the other methods do."""
        return self.add(name, COMPUTE, {"compute": seconds}, after)

    def exchange(
        self,
        name: str,
        stream: str,
        traffic: Traffic,
        phase: str,
        after: Sequence[int],
        gathered_bytes: float = 0.0,
        reduced_bytes: float = 0.0,
    ) -> int:
        """Append an exchange among ranks, with what it takes of PCIe and of computation.

        ``gathered_bytes`` are those that each rank has at its end and had not before,
        ``reduced_bytes`` those that it had and gives.
        """
        self.count("inter_node", phase, traffic.inter_node_bytes)
        self.count("intra_node", phase, traffic.intra_node_bytes)
        known = (traffic, gathered_bytes, reduced_bytes)
        if known not in self._exchanges:
            demands = used(self._demands(traffic, gathered_bytes, reduced_bytes))
            self._exchanges[known] = demands, traffic.latency_seconds(self.hardware)
        demands, latency = self._exchanges[known]
        self.tasks.append(Task(name, stream, demands, tuple(after), latency))
        return len(self.tasks) - 1

    def _demands(
        self, traffic: Traffic, gathered_bytes: float, reduced_bytes: float
    ) -> dict[str, float]:
        """Demands of an exchange on each resource."""
        hardware = self.hardware
        demands = {
            "inter_node": traffic.inter_node_bytes / hardware.inter_bytes_per_s,
            "intra_node": traffic.intra_rank_bytes / hardware.intra_bytes_per_s,
        }
        over_pcie = 0.0
        if hardware.nic_shares_pcie:
            over_pcie += traffic.inter_node_bytes / hardware.ranks_per_node
        if hardware.intra_shares_pcie:
            over_pcie += traffic.intra_rank_bytes
        demands["host_to_device"] = over_pcie / hardware.host_to_device_bytes_per_s
        demands["device_to_host"] = over_pcie / hardware.device_to_host_bytes_per_s
        sent = traffic.inter_node_bytes + traffic.intra_node_bytes
        # Ranks that share their cores share what all of them send, too.
        sharing = hardware.ranks_sharing_device / hardware.ranks_per_node
        demands["compute"] = hardware.overheads.byte_seconds * sharing * sent
        arrived = gathered_bytes * hardware.ranks_sharing_device
        demands["compute"] += hardware.overheads.gathered_byte_seconds * arrived
        exchanged = gathered_bytes + reduced_bytes
        demands["compute"] += exchanged / hardware.rates.exchanged_bytes_per_s
        messages = traffic.inter_messages + traffic.intra_messages
        demands["compute"] += hardware.overheads.message_seconds * messages
        return demands

    def copy(
        self, name: str, link: str, stream: str, nbytes: float, phase: str, after: Sequence[int]
    ) -> int:
        """Append a rank's copy of ``nbytes`` between host and device."""
        rate: float = getattr(self.hardware, f"{link}_bytes_per_s")
        self.count(link, phase, nbytes * self.hardware.ranks_per_node)
        return self.add(name, stream, {link: nbytes / rate}, after)

    def disk(self, name: str, kind: str, nbytes: float, phase: str, after: Sequence[int]) -> int:
        """Append a node's ``read`` or ``write``, of ``nbytes`` for each of its ranks."""
        rate: float = getattr(self.hardware, f"disk_{kind}_bytes_per_s")
        of_node = nbytes * self.hardware.ranks_per_node
        self.count("disk", phase, of_node)
        return self.add(name, f"disk {kind}", {"disk": of_node / rate}, after)

    def add(
        self,
        name: str,
        stream: str,
        demands: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float = 0.0,
    ) -> int:
        self.tasks.append(Task(name, stream, used(demands), tuple(after), latency_seconds))
        return len(self.tasks) - 1

    def count(self, link: str, phase: str, nbytes: float) -> None:
        if nbytes:
            phases = self.moved_bytes.setdefault(link, {})
            phases[phase] = phases.get(phase, 0.0) + nbytes


def used(demands: Mapping[str, float]) -> dict[str, float]:
    """The resources that a task does use, with their seconds."""
    return {resource: seconds for resource, seconds in demands.items() if seconds > 0}
