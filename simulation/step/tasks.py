"""Tasks on shared resources, and their simulation event by event: exact and deterministic.

A task waits for the tasks that it comes after and for the one before it on its stream. Then its
latency passes, and then it makes progress as fast as its resources allow. Each resource can be
used for one second per second; tasks that want more than there is share it max-min fairly.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from simulation.hardware import Hardware
from simulation.traffic import Traffic

#: Share of a task below which what is left of it is rounding.
_DONE = 1e-9
#: Sets of concurrent tasks whose speeds are cached: those of a step repeat.
_REMEMBERED = 4096
_Uses = tuple[tuple[str, float], ...]
#: Stream of tasks that block the host's one thread, or the device.
COMPUTE = "compute"


class Task(NamedTuple):
    """A piece of a step's work, on one stream. ``after`` are indices of earlier tasks."""

    name: str
    #: Tasks of one stream run one after the other, in the order of the list.
    stream: str
    #: Seconds that each resource needs for it alone; it uses them at the same time.
    demands: Mapping[str, float]
    after: tuple[int, ...] = ()
    #: Seconds before it uses its resources.
    latency_seconds: float = 0.0

    @property
    def slowest(self) -> str:
        """The kind of the resource that it needs longest, or ``latency``."""
        most = max(self.demands, key=lambda name: self.demands[name], default="latency")
        waits = self.latency_seconds > self.demands.get(most, 0.0)
        return "latency" if waits else kind_of(most)


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


def kind_of(resource: str) -> str:
    """The kind of a resource: where nodes do not do the same, its name ends with a group's."""
    return resource.partition(" ")[0]


def busy_seconds(tasks: Iterable[Task]) -> dict[str, float]:
    """Seconds of full use of each kind of resource that any of the tasks uses, of the busiest."""
    busy: dict[str, float] = {}
    for task in tasks:
        for resource, seconds in task.demands.items():
            busy[resource] = busy.get(resource, 0.0) + seconds
    kinds: dict[str, float] = {}
    for resource, seconds in busy.items():
        kinds[kind_of(resource)] = max(seconds, kinds.get(kind_of(resource), 0.0))
    return kinds


class _Running:
    """Tasks under way that share resources with one another, and with no others."""

    def __init__(self) -> None:
        self._tasks: list[int] = []
        #: Shares of resources that each would use alone; what is left of the seconds that it would
        #: take alone, and when that was; its speed (1: as if alone).
        self._uses: list[_Uses] = []
        self._left: list[float] = []
        self._since = 0.0
        self._speeds: Sequence[float] = ()
        #: When the first of them ends, as ``settle`` has found.
        self.ends = inf

    def add(self, index: int, demands: Mapping[str, float], seconds: float, now: float) -> None:
        """Add a task that would take so many seconds alone; ``settle`` then."""
        self._advance(now)
        self._tasks.append(index)
        self._uses.append(_uses(tuple(demands.items()), seconds))
        self._left.append(seconds)

    def settle(self) -> float:
        """Share the resources anew among the tasks; returns when the first of them ends."""
        if len(self._tasks) == 1:
            self._speeds = (1.0,)
        else:
            self._speeds = _speeds(tuple(self._uses))
        rests = (rest / speed for rest, speed in zip(self._left, self._speeds, strict=True))
        self.ends = self._since + min(rests, default=inf)
        return self.ends

    def end(self, now: float, tolerance: float) -> list[int]:
        """Remove the tasks that end now, or so many seconds later at most; ``settle`` then."""
        rests = [rest / speed for rest, speed in zip(self._left, self._speeds, strict=True)]
        reached = max(now - self._since, min(rests)) + tolerance
        ended = [at for at, rest in enumerate(rests) if rest <= reached]
        self._advance(now)
        tasks = [self._tasks[at] for at in ended]
        for at in reversed(ended):
            del self._tasks[at], self._uses[at], self._left[at]
        self.ends = inf
        return tasks

    def _advance(self, now: float) -> None:
        if now > self._since:
            gone = now - self._since
            left = zip(self._left, self._speeds, strict=True)
            self._left = [max(0.0, rest - gone * speed) for rest, speed in left]
            self._since = now


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Let the tasks run from time 0, each once all that it waits for has ended.

    Ends that differ by rounding are one event.
    """
    before = _predecessors(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    missing = [len(group) for group in before]
    for index, group in enumerate(before):
        for earlier in group:
            followers[earlier].append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    apart = _apart(tasks)
    running = [_Running() for _ in range(1 + max(apart, default=0))]
    #: Ends of latencies, with the tasks; ends of what runs, with its part; parts that have changed.
    waiting: list[tuple[float, int]] = []
    ending: list[tuple[float, int]] = []
    changed: set[int] = set()
    now, tolerance = 0.0, 0.0
    ready = [index for index, count in enumerate(missing) if count == 0]
    while True:
        for index in ready:
            starts[index] = now
            heapq.heappush(waiting, (now + tasks[index].latency_seconds, index))
        ended = []
        while waiting and waiting[0][0] <= now:
            _, index = heapq.heappop(waiting)
            seconds = max(tasks[index].demands.values(), default=0.0)
            if seconds:
                running[apart[index]].add(index, tasks[index].demands, seconds, now)
                changed.add(apart[index])
            else:
                ended.append(index)
        if not ended:
            for part in changed:
                heapq.heappush(ending, (running[part].settle(), part))
            changed.clear()
            while ending and ending[0][0] != running[ending[0][1]].ends:
                heapq.heappop(ending)  # it was settled anew since
            then = min((heap[0][0] for heap in (ending, waiting) if heap), default=inf)
            if then == inf:
                break
            now, tolerance = then, (then - now) * _DONE
            while ending and ending[0][0] <= now + tolerance:
                at, part = heapq.heappop(ending)
                if at == running[part].ends:
                    ended += running[part].end(now, tolerance)
                    changed.add(part)
        ready = []
        for index in ended:
            ends[index] = now
            for follower in followers[index]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        ready.sort()
    spans = tuple(map(Span, starts, ends))
    return Timeline(tuple(tasks), spans, before)


def _apart(tasks: Sequence[Task]) -> list[int]:
    """A number for each task: tasks of two numbers have no resource in common, nor by others."""
    linked: dict[str, str] = {}

    def root(name: str) -> str:
        while linked.setdefault(name, name) != name:
            linked[name] = name = linked[linked[name]]
        return name

    used_together = [tuple(task.demands) for task in tasks]
    for first, *others in filter(None, dict.fromkeys(used_together)):
        for other in others:
            linked[root(other)] = root(first)
    numbers: dict[str, int] = {}
    of = {names: root(names[0]) if names else "" for names in dict.fromkeys(used_together)}
    return [numbers.setdefault(of[names], len(numbers)) for names in used_together]


@lru_cache(maxsize=_REMEMBERED)
def _uses(demands: _Uses, seconds: float) -> _Uses:
    """The share of each resource that a task of so many seconds uses while it runs alone."""
    return tuple((name, used / seconds) for name, used in demands if used > _DONE * seconds)


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


@lru_cache(maxsize=_REMEMBERED)
def _speeds(running: tuple[_Uses, ...]) -> tuple[float, ...]:
    """Speeds of tasks that share resources.

    All speeds rise together until a resource is full; tasks that use it stay there, the rest go on.
    """
    speeds = [0.0] * len(running)
    rising = list(range(len(running)))
    free = {name: 1.0 for uses in running for name, _ in uses}
    level = 0.0
    while rising:
        demand: dict[str, float] = {}
        for at in rising:
            for name, use in running[at]:
                demand[name] = demand.get(name, 0.0) + use
        step = min((free[name] / use for name, use in demand.items()), default=1.0)
        step = min(step, 1.0 - level)
        level += step
        for name, use in demand.items():
            free[name] -= step * use
        full = {name for name in demand if free[name] <= _DONE}
        for at in rising:
            speeds[at] = level
        if level >= 1.0 - _DONE:
            break
        rising = [at for at in rising if not full & dict(running[at]).keys()]
    return tuple(speeds)


@dataclass
class Tasks:
    """The tasks so far, and the bytes that they move: one node's, by link and phase."""

    hardware: Hardware
    tasks: list[Task] = field(default_factory=list)
    moved_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Demands of exchanges, which repeat.
    _exchanged: dict[tuple[Traffic, float, float], dict[str, float]] = field(
        default_factory=dict, repr=False
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

        ``gathered_bytes`` are those of a gather's output on each rank, ``reduced_bytes`` those of a
        reduction's input.
        """
        demands = self.exchanged(traffic, phase, gathered_bytes, reduced_bytes)
        return self.add(name, stream, demands, after, traffic.latency_seconds(self.hardware))

    def exchanged(
        self, traffic: Traffic, phase: str, gathered_bytes: float, reduced_bytes: float
    ) -> dict[str, float]:
        """The seconds that an exchange needs of each resource; its bytes are counted."""
        self.count("inter_node", phase, traffic.inter_node_bytes)
        self.count("intra_node", phase, traffic.intra_node_bytes)
        known = traffic, gathered_bytes, reduced_bytes
        if known not in self._exchanged:
            self._exchanged[known] = self._demands(*known)
        return self._exchanged[known]

    def _demands(
        self, traffic: Traffic, gathered_bytes: float, reduced_bytes: float
    ) -> dict[str, float]:
        hardware, over_pcie = self.hardware, 0.0
        if hardware.nic_shares_pcie:
            over_pcie += traffic.inter_node_bytes / hardware.ranks_per_node
        if hardware.intra_shares_pcie:
            over_pcie += traffic.intra_rank_bytes
        sent = traffic.inter_node_bytes + traffic.intra_node_bytes
        # Ranks that share their cores share what all of them send, too.
        sharing = hardware.ranks_sharing_device / hardware.ranks_per_node
        compute = hardware.overheads.byte_seconds * sharing * sent
        arrived = gathered_bytes * hardware.ranks_sharing_device
        compute += hardware.overheads.gathered_byte_seconds * arrived
        compute += (gathered_bytes + reduced_bytes) / hardware.rates.exchanged_bytes_per_s
        messages = traffic.inter_messages + traffic.intra_messages
        compute += hardware.overheads.message_seconds * messages
        demands = {
            "inter_node": traffic.inter_node_bytes / hardware.inter_bytes_per_s,
            "intra_node": traffic.intra_rank_bytes / hardware.intra_bytes_per_s,
            "host_to_device": over_pcie / hardware.host_to_device_bytes_per_s,
            "device_to_host": over_pcie / hardware.device_to_host_bytes_per_s,
            "compute": compute,
        }
        return used(demands)

    def copy(
        self, name: str, link: str, stream: str, nbytes: float, phase: str, after: Sequence[int]
    ) -> int:
        """Append a rank's copy of ``nbytes`` between host and device."""
        return self.add(name, stream, {link: self.copied(link, nbytes, phase)}, after)

    def copied(self, link: str, nbytes: float, phase: str) -> float:
        """The seconds that a rank's copy takes; its bytes are counted."""
        rate: float = getattr(self.hardware, f"{link}_bytes_per_s")
        self.count(link, phase, nbytes * self.hardware.ranks_per_node)
        return nbytes / rate

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
