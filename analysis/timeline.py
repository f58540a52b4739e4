"""A step's timeline: a rank's spans, read from traces, in a panel per trace.

Traces are the simulator's, or a rank's of torch.profiler. Both are in the Trace Event Format, but
name their spans differently.
"""

import gzip
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, cast, get_args

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from analysis import text
from analysis.figures import axes
from analysis.figures.drawings import Drawing, canvas

Lane = Literal[
    "compute",
    "gather, between nodes",
    "gather, inside the node",
    "reduce, between nodes",
    "reduce, inside the node",
    "cache and copies",
    "disk",
]
LANES: tuple[Lane, ...] = get_args(Lane)
Phase = Literal["forward", "backward", "optimizer"]

#: Ranges of the library and, where it is not used, of FSDP2, whose exchanges cross nodes.
_RANGES: dict[str, Lane] = {
    "fcdp::gather_inter": "gather, between nodes",
    "fcdp::gather_intra": "gather, inside the node",
    "fcdp::reduce_inter": "reduce, between nodes",
    "fcdp::reduce_intra": "reduce, inside the node",
    "fcdp::cache_store": "cache and copies",
    "fcdp::cache_load": "cache and copies",
}
_FSDP2: dict[str, Lane] = {
    "FSDP::all_gather": "gather, between nodes",
    "FSDP::post_backward_reduce": "reduce, between nodes",
}
#: Prefixes of ranges that may outlast the range that started them.
_BACKEND = ("gloo:",)
#: Hooks between a module's computations: they wait, copy and exchange.
_HOOKS = ("FSDP::", "fcdp::")
#: Ranges that mark the start of a phase.
_MARKS: dict[str, Phase] = {
    "FSDP::root_pre_forward": "forward",
    "FSDP::pre_backward": "backward",
    "autograd::engine": "backward",
    "Optimizer.step": "optimizer",
}
#: Computation without a gap longer than this share of the step is one span.
_GAP = 0.003


#: A span in a trace's microseconds: lane, phase, start, end.
_Timed = tuple[Lane, Phase, float, float]


@dataclass(frozen=True)
class Span:
    """A rank's work in one lane, in seconds from the step's start."""

    lane: Lane
    phase: Phase
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    name: str
    #: How it was obtained: ``simulated`` or ``profiled``.
    evidence: Literal["simulated", "profiled"]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """The time from the first span's start to the last one's end."""
        return max(span.end for span in self.spans)


def load(file: Path) -> Step:
    """The step of a trace, compressed or not.

    Raises ``ValueError`` for a file that is no trace of a step on CPUs, ``OSError`` if it cannot
    be read.
    """
    trace = _parsed(file)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    if trace.get("otherData", {}).get("evidence") == "simulated":
        name = trace["otherData"].get("cell", file.name.partition(".")[0])
        return Step(name, "simulated", _from_zero(_simulated(events)))
    if any(event.get("cat") == "kernel" for event in events):
        raise ValueError(f"{file}: has kernels of a GPU, which this does not draw; see Perfetto")
    # A run's folder has cells/ID/profile/rank0.json.gz.
    cell, rank = file.resolve().parent.parent.name, file.name.partition(".")[0]
    spans = _from_zero(_profiled(events))
    if not spans:
        raise ValueError(f"{file}: holds no exchange of FCDP or FSDP2")
    return Step(f"{cell}, {rank}", "profiled", spans)


def _parsed(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        trace = json.loads(content)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file}: not a trace: {error}") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{file}: not a trace: it has no list of traceEvents")
    return trace


def _from_zero(spans: Iterable[_Timed]) -> tuple[Span, ...]:
    """Spans in their order, in seconds from the first one's start."""
    timed = sorted(spans, key=itemgetter(2, 3))
    zero = timed[0][2] / 1e6 if timed else 0.0
    return tuple(
        Span(lane, phase, start / 1e6 - zero, end / 1e6 - zero) for lane, phase, start, end in timed
    )


def _simulated(events: Sequence[dict[str, Any]]) -> Iterator[_Timed]:
    """A span per task, in the lane of the resource that it uses most."""
    for event in events:
        name, start = event["name"], event["ts"]
        if event["dur"] > 0:
            yield _lane(name, event["args"]), _named_phase(name), start, start + event["dur"]


def _named_phase(name: str) -> Phase:
    if name.startswith("forward"):
        return "forward"
    return "backward" if name.startswith(("backward", "reduce", "gradients")) else "optimizer"


def _lane(name: str, demands: dict[str, float]) -> Lane:
    most = max(demands, key=lambda key: demands[key], default="compute_seconds")
    resource = most.removesuffix("_seconds")
    kind = re.search(r"\b(gather|reduce)\b", name)
    if resource == "disk":
        return "disk"
    if resource in ("host_to_device", "device_to_host"):
        return "cache and copies"
    if kind is None or name.endswith(("store", "copy in")):
        return "compute"
    place = "between nodes" if resource == "inter_node" else "inside the node"
    return cast(Lane, f"{kind[1]}, {place}")


def _profiled(events: Sequence[dict[str, Any]]) -> Iterator[_Timed]:
    """Spans of exchanges, which last until the work that they started ends, and of computation."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    known = _RANGES if any(_key(event) in _RANGES for event in events) else _FSDP2
    ranges = [event for event in events if _key(event) in known]
    if not ranges:
        return
    phase_of = _phases(events)
    ends = _ends(ranges, events)
    for event, end in zip(ranges, ends, strict=True):
        yield known[_key(event)], phase_of(event["ts"]), event["ts"], end
    for start, end in _computing(events, phase_of):
        yield "compute", phase_of(start), start, end


def _key(event: dict[str, Any]) -> str:
    return str(event["name"]).split(" ", 1)[0]


def _ends(ranges: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]) -> list[float]:
    """The end of each range, or of the backend's work that it started if that is later."""
    ends = [event["ts"] + event["dur"] for event in ranges]
    range_ends, starts = list(ends), [event["ts"] for event in ranges]
    for event in events:
        if event["name"].startswith(_BACKEND):
            at = bisect_right(starts, event["ts"]) - 1
            if at >= 0 and event["ts"] <= range_ends[at]:
                ends[at] = max(ends[at], event["ts"] + event["dur"])
    return ends


def _phases(events: Sequence[dict[str, Any]]) -> Callable[[float], Phase]:
    """A function from a time to its phase, which is that of the last mark before it."""
    marks: list[tuple[float, Phase]] = sorted(
        (event["ts"], phase)
        for event in events
        for start, phase in _MARKS.items()
        if event["name"].startswith(start)
    )
    times = [at for at, _ in marks]

    def phase_of(at: float) -> Phase:
        before = bisect_right(times, at)
        return marks[before - 1][1] if before else "forward"

    return phase_of


def _computing(
    events: Sequence[dict[str, Any]], phase_of: Callable[[float], Phase]
) -> Iterator[tuple[float, float]]:
    """Intervals in which operators run outside of FSDP2's hooks, near ones of a phase joined."""
    step = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    until, joined = 0.0, None
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        if event["name"].startswith(_HOOKS):
            until = max(until, end)
        if start < until or not event["name"].startswith("aten::"):
            continue
        if joined is None:
            joined = (start, end)
        elif start - joined[1] <= _GAP * step and phase_of(start) == phase_of(joined[0]):
            joined = (joined[0], max(joined[1], end))
        else:
            yield joined
            joined = (start, end)
    if joined is not None:
        yield joined


#: Okabe and Ito's colours; phases differ in lightness too.
_COLOURS: dict[Phase, str] = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00"}
#: Heights in inches, of a lane, and of a panel's title and axis.
PITCH, FRAME = 0.24, 0.75
#: The least width of a bar, as a share of the axis.
_LEAST = 0.002


def draw(steps: Sequence[Step]) -> Drawing:
    """One panel per step, stacked over the same axis of milliseconds."""
    lanes = [lane for lane in LANES if any(s.lane == lane for step in steps for s in step.spans)]
    longest = max(step.seconds for step in steps)
    height = len(steps) * (PITCH * len(lanes) + FRAME) + 0.4
    with canvas(8.2, height, len(steps), sharex=True) as (figure, grid):
        panels = grid[:, 0]
        for step, ax in zip(steps, panels, strict=True):
            _panel(ax, step, lanes, 1e3 * _LEAST * longest)
            ax.set_xlim(0, 1e3 * longest)
        panels[-1].set_xlabel("ms from the start of the step")
        handles = [Patch(color=colour, label=phase) for phase, colour in _COLOURS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    evidence = " and ".join(dict.fromkeys(step.evidence for step in steps))
    caption = f"What one rank does when, {evidence}; a bar is as long as what it stands for takes."
    return Drawing("timeline", "A step's timeline", caption, figure)


def save(drawing: Drawing, file: Path) -> None:
    """Write the picture; an SVG's text stays text, and the same steps give the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dates = {".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        drawing.figure.savefig(file, dpi=200, metadata=dates.get(file.suffix))


def _panel(ax: Axes, step: Step, lanes: Sequence[Lane], least: float) -> None:
    """A bar per span, at least ``least`` milliseconds wide so that none is too thin to be seen."""
    for at, lane in enumerate(lanes):
        for phase, colour in _COLOURS.items():
            bars = [
                (1e3 * span.start, max(1e3 * (span.end - span.start), least))
                for span in step.spans
                if (span.lane, span.phase) == (lane, phase)
            ]
            ax.broken_barh(
                bars, (at - axes.BAR / 2, axes.BAR), color=colour, edgecolor="white", linewidth=0.15
            )
    ax.set_title(f"{step.evidence}: {step.name}, {text.number(1e3 * step.seconds)} ms", loc="left")
    axes.name_bars(ax, lanes)
