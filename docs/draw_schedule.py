"""Draws docs/figures/schedule-*.svg: what one rank does when, as docs/how-it-works.md has it.

On CUDA these are the simulator's tasks, whose order on each stream is the library's
(tests/simulation/step/test_order.py). On CPUs it is drawn by rules of its own, whose order
tests/docs/test_schedule.py compares with a profile of a real step. Durations are made up: a link
between nodes that is slow, a host link that is not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fcdp.blocks import BLOCKS_AHEAD
from fcdp.in_flight import MOST_IN_FLIGHT
from simulation.hardware import cluster
from simulation.models import from_config
from simulation.prediction import build
from simulation.step.tasks import Task, simulate
from simulation.workload import Workload


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
class Bar:
    lane: str
    kind: Kind
    unit: str
    start: float
    end: float


@dataclass
class Timeline:
    """Bars in the order of their issue. Each lane has one at a time."""

    lanes: Sequence[str]
    bars: list[Bar] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    #: Times at which a micro-batch begins, with its name.
    marks: list[tuple[float, str]] = field(default_factory=list)

    def run(
        self, lane: str, kind: Kind, unit: str, after: float, length: float | None = None
    ) -> Bar:
        start = max(after, self.free.get(lane, 0.0))
        end = self.free[lane] = start + (kind.length if length is None else length)
        self.bars.append(Bar(lane, kind, unit, start, end))
        return self.bars[-1]


#: Lengths of the computation outside of the blocks, of the adapters' transfers, and of a copy from
#: memory to memory on CPUs.
_ROOT_COMPUTE, _SHORT, _COPY = 1.5, 0.7, 1.0

#: Streams of the simulator's tasks on CUDA: the lane of each, and what it does.
_LANES: Mapping[str, tuple[str, Kind | None]] = {
    "host": ("host thread", Kind.FLAGS),
    "compute": ("compute stream", None),
    "gather across": ("inter-node stream", Kind.GATHER_INTER),
    "gather": ("all-gather stream", Kind.GATHER_INTRA),
    "copy out": ("copies out", Kind.STORE),
    "copy in": ("copies in", Kind.LOAD),
    "reduce": ("reduce-scatter stream", None),
}


def cuda(
    layers: int, *, adapters: bool = False, recomputed: bool = False, micro_batches: int = 1
) -> Timeline:
    """The simulator's step of one rank on CUDA, policy ``host``."""
    shape = {"n_embd": 1024, "n_layer": layers, "n_head": 8, "n_positions": 64, "vocab_size": 256}
    model = from_config({"model_type": "gpt2", **shape}, 64)
    workload = Workload(
        strategy="fcdp",
        model=model,
        lora=model.lora(1) if adapters else None,
        sequence_length=64,
        micro_batch=1,
        accumulation=micro_batches,
    )
    hardware = cluster("a40", nodes=2, ranks_per_node=2, inter_bits_per_s=1e9)
    tasks = _with_flags(build(workload, hardware).tasks.tasks)
    parts = [_parts(task, recomputed=recomputed) for task in tasks]
    lengths = [sum(length for _, length in of_task) for of_task in parts]
    timed = simulate(
        [
            task._replace(demands={task.stream: length}, latency_seconds=0.0)
            for task, length in zip(tasks, lengths, strict=True)
        ]
    )
    used = {task.stream for task in tasks}
    line = Timeline([lane for stream, (lane, _) in _LANES.items() if stream in used])
    begins: list[float] = []
    for task, of_task, span in zip(tasks, parts, timed.spans, strict=True):
        if task.stream == "host":
            begins.append(line.free.get("compute stream", 0.0))
        for kind, length in of_task:
            line.run(_LANES[task.stream][0], kind, _unit(task), span.start, length)
    if micro_batches > 1:
        names = ["first", *["middle"] * (micro_batches - 2), "last"]
        line.marks += zip(begins, names, strict=True)
    return line


def _with_flags(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, and the exchange of flags that each pass begins with; all that follows waits.

    The host, which exchanges them, is one computation ahead of the device.
    """
    made: list[Task] = []
    places: list[int] = []
    flags, forward = 0, False
    before: tuple[int, ...] = ()
    for task in tasks:
        if task.name.startswith("forward") and not forward:
            flags = len(made)
            made.append(Task("flags", "host", {}, before))
        forward = task.name.startswith("forward")
        places.append(len(made))
        made.append(task._replace(after=(flags, *(places[at] for at in task.after))))
        if task.stream == "compute":
            before = made[-1].after
    return made


def _parts(task: Task, *, recomputed: bool) -> list[tuple[Kind, float]]:
    """Actions of a task, one after the other, and how long each takes."""
    kind = _LANES[task.stream][1]
    if task.stream == "reduce":
        kind = Kind.REDUCE_INTER if "inter_node" in task.demands else Kind.REDUCE_INTRA
    if kind is not None:
        return [(kind, _SHORT if "adapters" in task.name else kind.length)]
    kind = Kind[task.name.split()[0].upper()]
    if task.name.endswith("head"):
        return [(kind, _ROOT_COMPUTE)]
    again = [Kind.RECOMPUTE] if recomputed and kind is Kind.BACKWARD else []
    return [(each, each.length) for each in (*again, kind)]


def _unit(task: Task) -> str:
    """The name of the task's unit in the figures: R, A, or a block's number from 1."""
    words = task.name.removesuffix(" copy in").split()
    if words[-1] in ("root", "head"):
        return "R"
    if "adapters" in words:
        return "A"
    return str(int(words[-1]) + 1) if "block" in words else ""


_THREAD, _ACROSS, _INSIDE = "the rank's thread", "gloo, across nodes", "gloo, inside the node"


@dataclass(eq=False)
class Unit:
    """A unit; ``dirty`` if written since its last gather."""

    name: str
    dirty: bool = True


@dataclass
class Cpu:
    """One rank on CPUs: one thread that computes and issues, and gloo's transfers beside it."""

    blocks: list[Unit]
    root: Unit
    now: float = 0.0
    under_way: dict[Unit, Bar] = field(default_factory=dict)
    in_flight: list[Bar] = field(default_factory=list)
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
        for bar in self.in_flight:
            self._wait(bar)
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

    def _wait(self, bar: Bar) -> None:
        self.now = max(self.now, bar.end)


def blocks(count: int) -> list[Unit]:
    return [Unit(str(index + 1)) for index in range(count)]


def schedules() -> dict[str, Timeline]:
    """Every figure's timeline, by the figure's name."""
    return {
        "full": cuda(3),
        "frozen": cuda(3, adapters=True),
        "checkpointing": cuda(3, recomputed=True),
        "accumulation": cuda(2, micro_batches=3),
        "cpu": Cpu(blocks(3), Unit("R")).step(),
    }


def draw(line: Timeline) -> Figure:
    figure = Figure(figsize=(12, 0.5 * len(line.lanes) + 1.7), layout="constrained")
    axes = figure.subplots()
    end = max(bar.end for bar in line.bars)
    rows = {lane: row for row, lane in enumerate(line.lanes)}
    for bar in line.bars:
        row, length = rows[bar.lane], bar.end - bar.start
        axes.add_patch(
            Rectangle(
                (bar.start, row - 0.36), length, 0.72, fc=bar.kind.colour, ec="#555555", lw=0.6
            )
        )
        if length > end / 100:
            middle = (bar.start + bar.end) / 2
            axes.text(middle, row, bar.unit, ha="center", va="center", fontsize=10)
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
    used = {bar.kind for bar in line.bars}
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
