"""Draws docs/figures/schedule-*.svg: what one rank does when, by the rules of docs/how-it-works.md.

Durations are made up (a link between nodes that is slow, a host link that is not); the order of
calls and what waits for what are the library's. tests/docs/test_schedule.py compares the order
with a profile of a real step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fcdp.blocks import BLOCKS_AHEAD
from fcdp.in_flight import MOST_IN_FLIGHT


class Kind(Enum):
    """Kind of a bar: its legend, its colour, its length."""

    FLAGS = ("exchange of flags", "#000000", 1.0)
    FORWARD = ("forward", "#9ecae1", 4.0)
    BACKWARD = ("backward", "#6baed6", 8.0)
    RECOMPUTE = ("recomputation", "#deebf7", 4.0)
    OPTIMIZER = ("optimizer", "#bdbdbd", 2.0)
    GATHER_INTER = ("inter-node all-gather", "#fd8d3c", 6.0)
    GATHER_INTRA = ("intra-node all-gather", "#fdd0a2", 1.5)
    STORE = ("into the cache", "#74c476", 2.0)
    LOAD = ("out of the cache", "#c7e9c0", 2.0)
    REDUCE_INTRA = ("intra-node reduce-scatter", "#dadaeb", 1.5)
    REDUCE_INTER = ("inter-node reduce-scatter", "#9e9ac8", 6.0)

    def __init__(self, legend: str, colour: str, length: float) -> None:
        self.legend = legend
        self.colour = colour
        self.length = length


@dataclass(frozen=True)
class Task:
    lane: str
    kind: Kind
    unit: str
    start: float
    end: float


@dataclass
class Timeline:
    """Tasks in the order of their issue. Each lane runs one at a time."""

    lanes: Sequence[str]
    tasks: list[Task] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    #: Times at which a micro-batch begins, with its name.
    marks: list[tuple[float, str]] = field(default_factory=list)

    def run(
        self, lane: str, kind: Kind, unit: str, after: float, length: float | None = None
    ) -> Task:
        start = max(after, self.free.get(lane, 0.0))
        end = self.free[lane] = start + (kind.length if length is None else length)
        self.tasks.append(Task(lane, kind, unit, start, end))
        return self.tasks[-1]


_ROOT_COMPUTE = 1.5
#: Length of the adapters' transfers.
_SHORT = 0.7
#: Length of a copy from memory to memory, on CPUs.
_COPY = 1.0


@dataclass(eq=False)
class Unit:
    """A unit; ``dirty`` if written since its last gather, ``reduced`` if it has gradients."""

    name: str
    dirty: bool = True
    reduced: bool = True
    landed: float = 0.0


@dataclass
class Cuda:
    """One rank on CUDA, policy ``host``, ``look_ahead=1``; the host issues a block ahead."""

    blocks: list[Unit]
    root: Unit
    adapters: Unit | None = None
    checkpointing: bool = False
    #: Whether units that stay gathered to the end of a backward are read again before they change.
    keeps_all: bool = False
    staged: Unit | None = None
    staged_at: float = 0.0
    #: When the last slice from the cache was free again.
    slice_free: float = 0.0
    #: Starts of the latest block's compute and of the one before.
    issued: float = 0.0
    issued_before: float = 0.0
    #: Ends of the latest reduction and of the one before.
    reduced_at: float = 0.0
    reduced_before: float = 0.0
    gathered: dict[Unit, float] = field(default_factory=dict)
    line: Timeline = field(
        default_factory=lambda: Timeline(
            [
                "host thread",
                "compute stream",
                "inter-node stream",
                "all-gather stream",
                "copies out",
                "copies in",
                "reduce-scatter stream",
            ]
        )
    )

    def step(self, micro_batches: int = 1) -> Timeline:
        self.keeps_all = micro_batches > 1
        for index in range(micro_batches):
            last = index == micro_batches - 1
            if micro_batches > 1:
                place = "last" if last else "middle" if index else "first"
                self.line.marks.append((self.line.free.get("compute stream", 0.0), place))
            self._forward()
            self._backward(last)
        self.line.run("compute stream", Kind.OPTIMIZER, "", self.reduced_at)
        used = {task.lane for task in self.line.tasks}
        self.line.lanes = [lane for lane in self.line.lanes if lane in used]
        return self.line

    def _forward(self) -> None:
        flags = self.line.run("host thread", Kind.FLAGS, "", self.issued)
        self.issued = flags.end
        order = [self.root, self.blocks[0]]
        order += [self.adapters] if self.adapters else []
        order += [*self.blocks[1:], self.blocks[-1]]
        following = dict(pairwise(order))
        begun = max(flags.end, self.line.free.get("compute stream", 0.0))
        self.issued = self.issued_before = begun
        self._gather(self.root, begun, following[self.root])
        self._compute(Kind.FORWARD, self.root, _ROOT_COMPUTE)
        for block in self.blocks:
            self._gather(block, self.issued, following[block])
            if block is self.blocks[0] and self.adapters:
                self._gather(self.adapters, self.issued, following[self.adapters])
                self.gathered[block] = self.gathered[self.adapters]
            self._compute(Kind.FORWARD, block)
        self._compute(Kind.FORWARD, self.root, _ROOT_COMPUTE)

    def _backward(self, last: bool) -> None:
        resharded = next(
            task.end
            for task in reversed(self.line.tasks)
            if task.unit == self.blocks[-1].name and task.lane == "compute stream"
        )
        self._prefetch(len(self.blocks) - 1, resharded)
        self._compute(Kind.BACKWARD, self.root, _ROOT_COMPUTE)
        for index, block in reversed([*enumerate(self.blocks)]):
            begins = max(self.line.free["compute stream"], self.gathered[block])
            self._prefetch(index - 1, begins)
            if self.checkpointing:
                self._compute(Kind.RECOMPUTE, block)
            self._compute(Kind.BACKWARD, block)
            self._reduce(block, last)
        if self.adapters:
            self._reduce(self.adapters, last)
        if self.root.reduced:
            self._compute(Kind.BACKWARD, self.root, _ROOT_COMPUTE)
            self._reduce(self.root, last)
        # FSDP2 ends backward by having the compute stream wait for the reductions.
        self.line.free["compute stream"] = max(self.line.free["compute stream"], self.reduced_at)

    def _prefetch(self, index: int, after: float) -> None:
        if index >= 0:
            following = self.blocks[index - 1] if index else None
            self._gather(self.blocks[index], after, following)

    def _gather(self, unit: Unit, after: float, following: Unit | None) -> None:
        arrived = self._across_nodes(unit) if unit.dirty else self._from_cache(unit, after)
        # After the store: the first gather of backward may be that of the unit just stored.
        self._look_ahead(following)
        length = _SHORT if unit is self.adapters else None
        spread = self.line.run(
            "all-gather stream", Kind.GATHER_INTRA, unit.name, max(after, arrived), length
        )
        self.slice_free = self.gathered[unit] = spread.end

    def _across_nodes(self, unit: Unit) -> float:
        """Gather into a slice, ahead of the gathers inside the node, and store it."""
        run, length = self.line.run, _SHORT if unit is self.adapters else None
        arrived = run(
            "inter-node stream", Kind.GATHER_INTER, unit.name, self.issued_before, length
        ).end
        if self.keeps_all or unit not in (self.root, self.adapters):
            unit.landed = run("copies out", Kind.STORE, unit.name, arrived, length).end
        unit.dirty = False
        return arrived

    def _from_cache(self, unit: Unit, after: float) -> float:
        """Return when the slice has come from the host: ahead of its gather, if it was foreseen."""
        if self.staged is unit:
            self.staged = None
            return self.staged_at
        return self._load(unit, after)

    def _look_ahead(self, unit: Unit | None) -> None:
        if unit is None or unit.dirty or self.staged is not None:
            return
        self.staged, self.staged_at = unit, self._load(unit, self.issued)

    def _load(self, unit: Unit, after: float) -> float:
        after = max(after, unit.landed, self.slice_free)
        return self.line.run("copies in", Kind.LOAD, unit.name, after).end

    def _compute(self, kind: Kind, unit: Unit, length: float | None = None) -> None:
        ready = self.gathered.get(unit, 0.0)
        start = self.line.run("compute stream", kind, unit.name, ready, length).start
        self.issued_before, self.issued = self.issued, start

    def _reduce(self, unit: Unit, last: bool) -> None:
        if not unit.reduced:
            return
        # Two input buffers: the compute stream waits for the reduction before the last.
        self.line.free["compute stream"] = max(
            self.line.free["compute stream"], self.reduced_before
        )
        run, length = self.line.run, _SHORT if unit is self.adapters else None
        after = self.line.free["compute stream"]
        done = run("reduce-scatter stream", Kind.REDUCE_INTRA, unit.name, after, length)
        if last:
            done = run("reduce-scatter stream", Kind.REDUCE_INTER, unit.name, done.end, length)
        self.reduced_before, self.reduced_at = self.reduced_at, done.end


_THREAD, _ACROSS, _INSIDE = "the rank's thread", "gloo, across nodes", "gloo, inside the node"


@dataclass
class Cpu:
    """One rank on CPUs: one thread that computes and issues, and gloo's transfers beside it."""

    blocks: list[Unit]
    root: Unit
    now: float = 0.0
    under_way: dict[Unit, Task] = field(default_factory=dict)
    in_flight: list[Task] = field(default_factory=list)
    line: Timeline = field(default_factory=lambda: Timeline([_THREAD, _ACROSS, _INSIDE]))

    def step(self) -> Timeline:
        self._wait(self.line.run(_ACROSS, Kind.FLAGS, "", self.now))
        self._begin(self.root)
        order = [self.root, *self.blocks]
        for index, unit in enumerate(order):
            self._finish(unit)
            for following in order[index + 1 :][:BLOCKS_AHEAD]:
                if following not in self.under_way:
                    self._begin(following)
            self._thread(Kind.FORWARD, unit, _ROOT_COMPUTE if unit is self.root else None)
        self._thread(Kind.FORWARD, self.root, _ROOT_COMPUTE)
        self._begin(self.blocks[-1])
        self._thread(Kind.BACKWARD, self.root, _ROOT_COMPUTE)
        for index, block in reversed([*enumerate(self.blocks)]):
            self._finish(block)
            if index:
                self._begin(self.blocks[index - 1])
            self._thread(Kind.BACKWARD, block)
            self._reduce(block)
        self._thread(Kind.BACKWARD, self.root, _ROOT_COMPUTE)
        self._reduce(self.root)
        for task in self.in_flight:
            self._wait(task)
        self._thread(Kind.OPTIMIZER, Unit(""))
        return self.line

    def _begin(self, unit: Unit) -> None:
        if not unit.dirty:
            self._thread(Kind.LOAD, unit, _COPY)
        kind, lane = (Kind.GATHER_INTRA, _INSIDE)
        if unit.dirty:
            kind, lane = (Kind.GATHER_INTER, _ACROSS)
        self.under_way[unit] = self.line.run(lane, kind, unit.name, self.now)

    def _finish(self, unit: Unit) -> None:
        self._wait(self.under_way.pop(unit))
        if unit.dirty:
            if unit is not self.root:  # no gather of the step would read it
                self._thread(Kind.STORE, unit, _COPY)
            self._wait(self.line.run(_INSIDE, Kind.GATHER_INTRA, unit.name, self.now))
            unit.dirty = False

    def _reduce(self, unit: Unit) -> None:
        self._wait(self.line.run(_INSIDE, Kind.REDUCE_INTRA, unit.name, self.now))
        while len(self.in_flight) >= MOST_IN_FLIGHT:
            self._wait(self.in_flight.pop(0))
        self.in_flight.append(self.line.run(_ACROSS, Kind.REDUCE_INTER, unit.name, self.now))

    def _thread(self, kind: Kind, unit: Unit, length: float | None = None) -> None:
        self._wait(self.line.run(_THREAD, kind, unit.name, self.now, length))

    def _wait(self, task: Task) -> None:
        self.now = max(self.now, task.end)


def blocks(count: int, *, frozen: bool = False) -> list[Unit]:
    return [Unit(str(index + 1), not frozen, not frozen) for index in range(count)]


def schedules() -> dict[str, Timeline]:
    """Every figure's timeline, by the figure's name."""
    return {
        "full": Cuda(blocks(3), Unit("R")).step(),
        "frozen": Cuda(
            blocks(3, frozen=True), Unit("R", dirty=False, reduced=False), Unit("A")
        ).step(),
        "checkpointing": Cuda(blocks(3), Unit("R"), checkpointing=True).step(),
        "accumulation": Cuda(blocks(2), Unit("R")).step(micro_batches=3),
        "cpu": Cpu(blocks(3), Unit("R")).step(),
    }


def draw(line: Timeline) -> Figure:
    figure = Figure(figsize=(12, 0.5 * len(line.lanes) + 1.7), layout="constrained")
    axes = figure.subplots()
    end = max(task.end for task in line.tasks)
    rows = {lane: row for row, lane in enumerate(line.lanes)}
    for task in line.tasks:
        row, length = rows[task.lane], task.end - task.start
        axes.add_patch(
            Rectangle(
                (task.start, row - 0.36), length, 0.72, fc=task.kind.colour, ec="#555555", lw=0.6
            )
        )
        if length > end / 100:
            middle = (task.start + task.end) / 2
            axes.text(middle, row, task.unit, ha="center", va="center", fontsize=10)
    for start, name in line.marks:
        axes.axvline(start, color="#888888", lw=0.8, ls="--")
        axes.text(start, -0.62, f" {name} micro-batch", fontsize=10, va="bottom")
    axes.set_xlim(0, end)
    axes.set_ylim(len(line.lanes) - 0.5, -0.65)
    axes.set_yticks([*rows.values()], [*rows], fontsize=11)
    axes.set_xticks([])
    axes.set_xlabel("time →", fontsize=11, loc="right")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row in rows.values():
        axes.axhline(row + 0.5, color="#eeeeee", lw=0.8, zorder=0)
    used = {task.kind for task in line.tasks}
    handles = [
        Patch(fc=kind.colour, ec="#555555", lw=0.6, label=kind.legend)
        for kind in Kind
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)
    return figure


def figures() -> dict[str, Figure]:
    """The figures by the names of their files."""
    return {f"schedule-{name}": draw(line) for name, line in schedules().items()}
