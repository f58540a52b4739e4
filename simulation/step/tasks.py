"""Tasks on shared resources, and their simulation event by event: exact and deterministic.

A task waits for the tasks that it comes after and for the one before it on its stream. Then its
latency passes, and then it makes progress as fast as its resources allow. Each resource can be
used for one second per second; tasks that want more than there is share it max-min fairly.
"""

from __future__ import annotations

import heapq
from collections import Counter
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
_ALONE = (1.0,)
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
        most = max(self.demands, key=self.demands.__getitem__, default="latency")
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
    before: Sequence[Sequence[int]]

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
            [
                tuple(index - begin for index in group if index >= begin)
                for group in self.before[begin:]
            ],
        )

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """Indices of the tasks that follow one another without a gap up to the last to end."""
        if not self.tasks:
            return ()
        before, ends = self.before, [span.end for span in self.spans]
        _, index = max(zip(ends, range(len(ends)), strict=True))
        path = [index]
        while group := before[index]:
            index = group[0] if len(group) == 1 else max((ends[i], i) for i in group)[1]
            path.append(index)
        return tuple(path[::-1])


def kind_of(resource: str) -> str:
    """The kind of a resource: where nodes do not do the same, its name ends with a group's."""
    return resource.partition(" ")[0]


def busy_seconds(tasks: Iterable[Task]) -> dict[str, float]:
    """Seconds of full use of each kind of resource that any of the tasks uses, of the busiest."""
    # Most tasks share their demands with others.
    shared = [task.demands for task in tasks]
    counts, demands = Counter(map(id, shared)), {id(each): each for each in shared}
    busy: dict[str, float] = {}
    for key, count in counts.items():
        for resource, seconds in demands[key].items():
            busy[resource] = busy.get(resource, 0.0) + count * seconds
    kinds: dict[str, float] = {}
    for resource, seconds in busy.items():
        kinds[kind_of(resource)] = max(seconds, kinds.get(kind_of(resource), 0.0))
    return kinds


def chain_seconds(tasks: Sequence[Task]) -> float:
    """Seconds of the longest chain of tasks that wait for one another, were each alone."""
    ends: list[float] = []
    latest: dict[str, float] = {}
    for task in tasks:
        start = max((ends[earlier] for earlier in task.after), default=0.0)
        start = max(start, latest.get(task.stream, 0.0))
        end = start + task.latency_seconds + max(task.demands.values(), default=0.0)
        latest[task.stream] = end
        ends.append(end)
    return max(ends, default=0.0)


class _Kind(NamedTuple):
    """Facts that tasks of the same demands share."""

    number: int
    #: The seconds that one takes alone, and the share of each resource that it uses then.
    seconds: float
    uses: _Uses
    #: Tasks of two parts have no resource in common, nor by others.
    part: int


class _Running:
    """Tasks under way that share resources with one another, and with no others."""

    def __init__(self) -> None:
        self.tasks: list[int] = []
        #: The kind of each; what is left of the seconds that it would take alone, and when that
        #: was.
        self.kinds: list[_Kind] = []
        self.left: list[float] = []
        self.since = 0.0
        #: The speed of each (1: as if alone), seconds until it ends, and when the first of them
        #: does.
        self.speeds: Sequence[float] = ()
        self.rests: list[float] = []
        self.ends = inf
        #: Speeds by the kinds of what runs, which repeat.
        self._known: dict[tuple[int, ...], Sequence[float]] = {}

    def settle(self) -> float:
        """Share the resources anew; returns when the first task ends."""
        left = self.left
        if len(left) == 1:
            self.speeds, self.rests = _ALONE, left
            self.ends = self.since + left[0]
        elif left:
            together = tuple([kind.number for kind in self.kinds])
            speeds = self._known.get(together)
            if speeds is None:
                speeds = self._known[together] = _speeds(tuple(kind.uses for kind in self.kinds))
            self.speeds = speeds
            self.rests = rests = [rest / speed for rest, speed in zip(left, speeds, strict=True)]
            self.ends = self.since + min(rests)
        else:
            self.speeds, self.ends = (), inf
        return self.ends

    def begin(self, task: int, kind: _Kind, now: float) -> None:
        """Add a task that begins now; ``settle`` then."""
        if now > self.since:
            self._advance(now)
        self.tasks.append(task)
        self.kinds.append(kind)
        self.left.append(kind.seconds)

    def _advance(self, now: float) -> None:
        """Let the time pass."""
        gone, self.since = now - self.since, now
        left = zip(self.left, self.speeds, strict=True)
        self.left = [max(0.0, rest - gone * speed) for rest, speed in left]

    def end(self, now: float, tolerance: float) -> list[int]:
        """Remove the tasks that end now, or so many seconds later at most; ``settle`` then."""
        self.ends = inf
        if len(self.tasks) == 1:
            ended, self.since = self.tasks, now
            self.tasks, self.kinds, self.left = [], [], []
            return ended
        reached = max(now - self.since, min(self.rests)) + tolerance
        places = [at for at, rest in enumerate(self.rests) if rest <= reached]
        if now > self.since:
            self._advance(now)
        ended = [self.tasks[at] for at in places]
        for at in reversed(places):
            del self.tasks[at], self.kinds[at], self.left[at]
        return ended


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Let the tasks run from time 0, each once all that it waits for has ended.

    Ends that differ by rounding are one event.
    """
    before = _predecessors(tasks)
    missing = [len(group) for group in before]
    # The followers of a task are a chain of links, from its latest on: lists would be thousands.
    links: list[tuple[int, int]] = []
    latest = [-1] * len(tasks)
    for index, group in enumerate(before):
        for earlier in group:
            links.append((index, latest[earlier]))
            latest[earlier] = len(links) - 1
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    kinds = _kinds(tasks)
    parts = [_Running() for _ in {kind.part for kind in kinds}]
    #: Ends of latencies, with the tasks; ends of what runs, with its part; parts that have changed.
    waiting: list[tuple[float, int]] = []
    ending: list[tuple[float, int]] = []
    changed: set[int] = set()
    now, tolerance = 0.0, 0.0
    ready = [index for index, count in enumerate(missing) if count == 0]
    while True:
        begun = []
        for index in ready:
            starts[index] = now
            if latency := tasks[index].latency_seconds:
                heapq.heappush(waiting, (now + latency, index))
            else:
                begun.append(index)
        while waiting and waiting[0][0] <= now:
            begun.append(heapq.heappop(waiting)[1])
        ended = []
        for index in begun:
            kind = kinds[index]
            if kind.seconds:
                parts[kind.part].begin(index, kind, now)
                changed.add(kind.part)
            else:
                ended.append(index)
        if not ended:
            for number in changed:
                heapq.heappush(ending, (parts[number].settle(), number))
            changed.clear()
            while ending and ending[0][0] != parts[ending[0][1]].ends:
                heapq.heappop(ending)  # it was settled anew since
            then = ending[0][0] if ending else inf
            if waiting and waiting[0][0] < then:
                then = waiting[0][0]
            if then == inf:
                break
            now, tolerance = then, (then - now) * _DONE
            while ending and ending[0][0] <= now + tolerance:
                at, number = heapq.heappop(ending)
                if at == parts[number].ends:
                    ended += parts[number].end(now, tolerance)
                    changed.add(number)
        ready = []
        for index in ended:
            ends[index] = now
            link = latest[index]
            while link >= 0:
                follower, link = links[link]
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        ready.sort()
    return Timeline(tuple(tasks), tuple(map(Span, starts, ends)), before)


def _kinds(tasks: Sequence[Task]) -> list[_Kind]:
    """The kind of each task, by its demands."""
    # Most tasks share their demands with others.
    items = {id(task.demands): task.demands for task in tasks}
    uses = {key: tuple(each.items()) for key, each in items.items()}
    kinds: dict[_Uses, _Kind] = dict.fromkeys(uses.values(), _Kind(0, 0.0, (), 0))
    for number, (each, part) in enumerate(zip(kinds, _apart(kinds), strict=True)):
        seconds = max((used for _, used in each), default=0.0)
        shares = tuple((name, used / seconds) for name, used in each if used > _DONE * seconds)
        kinds[each] = _Kind(number, seconds, shares, part)
    of = {key: kinds[each] for key, each in uses.items()}
    return [of[id(task.demands)] for task in tasks]


def _apart(kinds: Iterable[_Uses]) -> list[int]:
    """The number of each kind's part: kinds of two parts have no resource in common, nor by others.

    Kinds have at least one resource, or none of time.
    """
    linked: dict[str, str] = {}

    def root(name: str) -> str:
        while linked.setdefault(name, name) != name:
            linked[name] = name = linked[linked[name]]
        return name

    used_together = [tuple(name for name, _ in demands) for demands in kinds]
    for first, *others in filter(None, dict.fromkeys(used_together)):
        for other in others:
            linked[root(other)] = root(first)
    numbers: dict[str, int] = {}
    of = {names: root(names[0]) if names else "" for names in dict.fromkeys(used_together)}
    return [numbers.setdefault(of[names], len(numbers)) for names in used_together]


def _predecessors(tasks: Sequence[Task]) -> list[tuple[int, ...]]:
    """Indices of the tasks that each waits for: its dependencies, and the last on its stream."""
    latest: dict[str, int] = {}
    groups = []
    for index, task in enumerate(tasks):
        group, last = task.after, latest.get(task.stream)
        if last is not None and last not in group:
            group = (*group, last)
        assert not group or max(group) < index, f"{task.name}: comes after a later task"
        latest[task.stream] = index
        groups.append(group)
    return groups


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
    #: Demands of what needs one resource; demands and latencies of exchanges. All of them repeat.
    _needed: dict[tuple[str, float], Mapping[str, float]] = field(default_factory=dict, repr=False)
    _exchanged: dict[tuple[Traffic, float, float], tuple[Mapping[str, float], float]] = field(
        default_factory=dict, repr=False
    )

    def timeline(self) -> Timeline:
        """The step, event by event."""
        return simulate(self.tasks)

    def compute(self, name: str, seconds: float, after: Sequence[int]) -> int:
        """Append a rank's computation; returns its index, as the other methods do."""
        return self.add(name, COMPUTE, self._only("compute", seconds), after)

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
        taken, latency = self.exchanged(traffic, phase, gathered_bytes, reduced_bytes)
        return self.add(name, stream, taken, after, latency)

    def exchanged(
        self, traffic: Traffic, phase: str, gathered_bytes: float, reduced_bytes: float
    ) -> tuple[Mapping[str, float], float]:
        """Seconds that an exchange needs of each resource, and of latency; its bytes are counted.

        ``gathered_bytes`` and ``reduced_bytes`` are those of ``exchange``.
        """
        self.count("inter_node", phase, traffic.inter_node_bytes)
        self.count("intra_node", phase, traffic.intra_node_bytes)
        key = traffic, gathered_bytes, reduced_bytes
        found = self._exchanged.get(key)
        if found is None:
            latency = traffic.latency_seconds(self.hardware)
            found = self._exchanged[key] = self._demands(*key), latency
        return found

    def _demands(
        self, traffic: Traffic, gathered_bytes: float, reduced_bytes: float
    ) -> Mapping[str, float]:
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
        demands = self._only(link, self.copied(link, nbytes, phase))
        return self.add(name, stream, demands, after)

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
        return self.add(name, f"disk {kind}", self._only("disk", of_node / rate), after)

    def add(
        self,
        name: str,
        stream: str,
        demands: Mapping[str, float],
        after: Sequence[int],
        latency_seconds: float = 0.0,
    ) -> int:
        """Append a task that uses each resource of its ``demands``, as ``used`` gives them."""
        self.tasks.append(Task(name, stream, demands, tuple(after), latency_seconds))
        return len(self.tasks) - 1

    def _only(self, resource: str, seconds: float) -> Mapping[str, float]:
        """The demands of a task that needs one resource: one object for all that are alike."""
        found = self._needed.get((resource, seconds))
        if found is None:
            found = self._needed[resource, seconds] = used({resource: seconds})
        return found

    def count(self, link: str, phase: str, nbytes: float) -> None:
        if nbytes:
            phases = self.moved_bytes.get(link)
            if phases is None:
                phases = self.moved_bytes[link] = {}
            phases[phase] = phases.get(phase, 0.0) + nbytes


def used(demands: Mapping[str, float]) -> Mapping[str, float]:
    """The resources that a task does use, with their seconds: the demands themselves, if all."""
    if all(demands.values()):
        return demands
    return {resource: seconds for resource, seconds in demands.items() if seconds > 0}
