"""A search for what would have to be true of the paper's cluster for its numbers to hold together.

    python -m analysis.paper.region

The paper's system (flat exchanges) is simulated. ``unknowns.yaml`` has the values that the paper
leaves open, ``region.json`` the points of the search.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, model_validator

from analysis.claims import papers
from analysis.claims.papers import Claims, Tolerance
from analysis.claims.verdicts import Ranged
from simulation import yaml_lines
from simulation.files import Name, Strict
from simulation.hardware import cluster
from simulation.models import PAPER_MODELS
from simulation.prediction import Prediction, predict
from simulation.transformer import Transformer
from simulation.workload import Workload

UNKNOWNS = Path(__file__).with_name("unknowns.yaml")
REGION = Path(__file__).with_name("region.json")
#: Depth and width are our choice: simulation/models.py says why.
_MODEL = Transformer.of(PAPER_MODELS["gpt-30b"], 2048)
_FAST, _SLOW = 100e9, 1e9
#: Rounds of the search over all unknowns, from the middle of their ranges.
_ROUNDS = 3
#: Values that a round tries of an unknown with a continuous range, nearer in later rounds.
_TRIED = 5
#: Values of an unknown are named where they span less than this share of its range.
_NARROWER = 0.85

#: The value of each unknown.
Point = Mapping[str, float]


class Unknown(Strict):
    """A value that the paper does not give, its range, and where that comes from."""

    values: tuple[float, ...] = ()
    between: tuple[float, float] | None = None
    source: str
    #: Its name for readers.
    words: str

    @model_validator(mode="after")
    def _has_a_range(self) -> "Unknown":
        if bool(self.values) == bool(self.between):
            raise ValueError("has values, or is between two; one of them")
        return self

    def has(self, value: float) -> bool:
        """Whether the value is in the range."""
        if self.between is None:
            return value in self.values
        return self.between[0] <= value <= self.between[1]

    def written(self, value: float) -> str:
        """The value in words; shares are in per cent."""
        share = max(self.between or self.values) <= 1
        return f"{100 * value:.3g} %" if share else f"{value:,g}"

    @property
    def range(self) -> str:
        """The range in words."""
        least, most = self.between or (min(self.values), max(self.values))
        return f"{self.written(least).removesuffix(' %')}–{self.written(most)}"

    def near(self, value: float, width: float) -> list[float]:
        """Values around one, over this share of the range."""
        if self.between is None:
            return list(self.values)
        low, high = self.between
        half = width * (high - low) / 2
        steps = (value + half * (2 * at / (_TRIED - 1) - 1) for at in range(_TRIED))
        return sorted({round(min(max(step, low), high), 2) for step in steps})


class Unknowns(Strict):
    """The contents of ``unknowns.yaml``."""

    seed: int
    #: Number of points that are drawn, over which verdicts are given.
    drawn: int = Field(ge=1)
    unknowns: dict[Name, Unknown]
    #: Template of a clause on the best point, which names the unknowns that matter most.
    opening: str
    #: Claims whose numbers the search brings together.
    numbers: tuple[Name, ...] = Field(min_length=1)
    #: Claims from which the paper's system was read.
    fitted: tuple[Name, ...] = ()


def load() -> Unknowns:
    """Read the file; ``ValueError`` for a mistake in it."""
    return Unknowns.model_validate(yaml_lines.load(UNKNOWNS).values)


@cache
def _predicted(
    strategy: str, experiment: str, policy: str, bits: float, *settings: float
) -> Prediction:
    full = experiment == "full"
    share, peak, pcie, length, recomputed, micro_batch = settings
    workload = Workload(
        strategy=strategy,
        model=_MODEL,
        lora=None if full else _MODEL.lora(8),
        sequence_length=int(length),
        micro_batch=int(micro_batch),
        recomputed=recomputed,
        policy=policy,
        exchanges="flat" if strategy.startswith("fcdp") else "hierarchical",
    )
    hardware = cluster(
        "a40",
        nodes=4 if full else 2,
        ranks_per_node=8,
        inter_bits_per_s=bits,
        matmul_efficiency=peak,
        link_efficiency=pcie,
        inter_efficiency=share,
    )
    return predict(workload, hardware)


def numbers(point: Point) -> dict[str, float]:
    """The claims' numbers at a point, in their units; NaN where a system is out of memory."""

    def cell(strategy: str, of: str, *, policy: str = "host", bits: float = _FAST) -> Prediction:
        link = "fast_share" if bits == _FAST else "slow_share"
        names = link, "peak_share", "pcie_share", f"{of}_length", f"{of}_recomputed"
        batch = point.get(f"{of}_micro_batch", 8)
        return _predicted(strategy, of, policy, bits, *(point[name] for name in names), batch)

    def over(a: Prediction, b: Prediction) -> float:
        return a.tokens_per_s / b.tokens_per_s if a.state == b.state == "ok" else math.nan

    zero3, hpz, full = (cell(name, "full") for name in ("deepspeed-zero3", "deepspeed-hpz", "fcdp"))
    table = cell("deepspeed-zero3", "table")
    systems = ("deepspeed-zero3", "fsdp2-reshard", "fcdp-sched", "fcdp")
    fast = {system: cell(system, "bandwidth") for system in systems}
    slow = {system: cell(system, "bandwidth", bits=_SLOW) for system in systems}
    sent = {system: 2 * step.inter_node_bytes / 1e9 for system, step in fast.items()}
    forward = {
        system: 2 * step.moved_bytes["inter_node"]["forward"] / 1e9 for system, step in fast.items()
    }
    backward = {system: sent[system] - forward[system] for system in systems}
    ends = [hpz.state == "oom", zero3.state == "ok", full.state == "ok"]
    volumes = {
        f"fcdp-volume-{name}-{part}": of[system]
        for name, system in zip(("zero3", "zeropp", "sched", "comm"), systems, strict=True)
        for part, of in (("total", sent), ("forward", forward), ("backward", backward))
    }
    gain = 100 * (over(full, zero3) - 1)
    return volumes | {
        "fcdp-volume-zeropp-saves": 100 * (1 - sent["fsdp2-reshard"] / sent["deepspeed-zero3"]),
        "fcdp-volume-comm-saves": 100 * (1 - sent["fcdp"] / sent["deepspeed-zero3"]),
        "fcdp-full-gain": gain,
        "fcdp-full-gain-summary": gain,
        "fcdp-zeropp-oom-30b": 100 * sum(ends) / len(ends),
        "fcdp-lora-6x": over(cell("fcdp", "table"), table),
        "fcdp-lora-7x-adaptive": over(cell("fcdp", "table", policy="auto"), table),
        "fcdp-lora-implied": over(fast["fcdp"], fast["deepspeed-zero3"]),
        "fcdp-100x-zero3": over(slow["fcdp"], slow["deepspeed-zero3"]),
        "fcdp-51x-zeropp": over(slow["fcdp"], slow["fsdp2-reshard"]),
        "fcdp-zero3-loses-speed": 100 * over(slow["deepspeed-zero3"], fast["deepspeed-zero3"]),
        "fcdp-keeps-speed": 100 * over(slow["fcdp"], fast["fcdp"]),
    }


class Asked(NamedTuple):
    """A number of the paper, and how near ours must be."""

    number: float
    tolerance: Tolerance

    def away(self, ours: float) -> float:
        """The distance of ours, 1 at the edge of the tolerance; infinite where ours is NaN."""
        if math.isnan(ours):
            return math.inf
        if self.tolerance.relative is None:
            return 0.0 if self.tolerance.admits(ours, self.number) else 2.0
        return abs(ours / self.number - 1) / self.tolerance.relative


def asked(claims: Claims) -> dict[str, Asked]:
    """The number of each claim and hypothesis on FCDP, and its first check's tolerance.

    Claims on outcomes ask for 100 %.
    """
    return {
        claim.id: Asked(100.0 if claim.number is None else claim.number, claim.checks[0].tolerance)
        for claim in claims.every
        if claim.paper == "fcdp" and claim.checks
    }


def search(holds: Unknowns, paper: Mapping[str, Asked]) -> dict[str, float]:
    """The point at which the most numbers are near enough; of these, the nearest."""
    order = random.Random(holds.seed)

    def badness(point: Point) -> tuple[int, float]:
        ours = numbers(point)
        by = [paper[name].away(ours[name]) for name in holds.numbers]
        return sum(value > 1 for value in by), sum(min(value, 10.0) for value in by)

    point = {
        name: unknown.values[len(unknown.values) // 2]
        if unknown.between is None
        else round(sum(unknown.between) / 2, 2)
        for name, unknown in holds.unknowns.items()
    }
    for turn in range(_ROUNDS):
        for name, unknown in order.sample(list(holds.unknowns.items()), len(holds.unknowns)):
            tried = [{**point, name: value} for value in unknown.near(point[name], 0.8 / 2**turn)]
            point = min([point, *tried], key=badness)
    return point


class Simulated(Strict):
    """A point, and the claims' numbers there; ``None`` where a system is out of memory."""

    point: dict[Name, float]
    numbers: dict[Name, float | None]


def simulated(point: Point) -> Simulated:
    """Simulate all cells at a point."""
    ours = {
        name: None if math.isnan(v) else float(f"{v:.6g}") for name, v in numbers(point).items()
    }
    return Simulated(point=dict(point), numbers=ours)


class Points(Strict):
    """The best point, and points drawn from all ranges."""

    best: Simulated
    drawn: tuple[Simulated, ...]


def draw(holds: Unknowns) -> list[dict[str, float]]:
    """Points drawn from all ranges, uniformly."""
    drawn = random.Random(holds.seed)
    return [
        {
            name: drawn.choice(unknown.values)
            if unknown.between is None
            else round(drawn.uniform(*unknown.between), 3)
            for name, unknown in holds.unknowns.items()
        }
        for _ in range(holds.drawn)
    ]


def ranges(holds: Unknowns, points: Points, paper: Mapping[str, Asked]) -> dict[str, Ranged]:
    """The range of each claim's number over the points that lie in the declared ranges."""
    inside = [p for p in points.drawn if all(holds.unknowns[n].has(v) for n, v in p.point.items())]
    by_claim = {}
    for name, asks in paper.items():
        best = points.best.numbers.get(name)
        pairs = [(p, value) for p in inside if (value := p.numbers.get(name)) is not None]
        if not pairs or best is None:
            continue
        values = [value for _, value in pairs]
        near = [p.point for p, value in pairs if asks.away(value) <= 1]
        share = len(near) / len(pairs)
        part = _part(holds, near) if 0 < share < 1 else ""
        ends = min(values), max(values)
        by_claim[name] = Ranged(*ends, share, part, best, name in holds.fitted)
    return by_claim


@dataclass(frozen=True)
class Region:
    """The unknowns, the points of the search, the paper's numbers, and the ranges of ours."""

    holds: Unknowns
    points: Points
    paper: Mapping[str, Asked]
    ranges: Mapping[str, Ranged]


def region(claims: Claims) -> Region:
    """The region of these claims, by the committed points."""
    holds, paper = load(), asked(claims)
    points = Points.model_validate_json(REGION.read_text(encoding="utf-8"))
    return Region(holds, points, paper, ranges(holds, points, paper))


def _part(holds: Unknowns, near: Sequence[Point]) -> str:
    """The unknowns' values at which a number agrees, where these are narrower than the ranges."""
    parts = []
    for name, unknown in holds.unknowns.items():
        low, high = min(at[name] for at in near), max(at[name] for at in near)
        least, most = unknown.between or (min(unknown.values), max(unknown.values))
        if high - low < _NARROWER * (most - least):
            parts.append(f"{unknown.words} {unknown.written(low)} to {unknown.written(high)}")
    return ", ".join(parts)


def in_words(holds: Unknowns, points: Points, paper: Mapping[str, Asked]) -> str:
    """How many of the numbers hold together at the best point, and its values that matter most."""
    near = sum(paper[name].away(_or_nan(points.best.numbers[name])) <= 1 for name in holds.numbers)
    at = {name: u.written(points.best.point[name]) for name, u in holds.unknowns.items()}
    of_all = f"{near} of {len(holds.numbers)} of the paper's numbers"
    return f"{of_all} hold together {holds.opening.format(**at)}"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def main() -> None:
    """Search for the best point, draw the others, and write all."""
    holds, paper = load(), asked(papers.load())
    best = simulated(search(holds, paper))
    for name in holds.numbers:
        ours = _or_nan(best.numbers[name])
        off = 100 * (ours / paper[name].number - 1)
        print(f"{name:28} {ours:8.4g} of {paper[name].number:8.4g} {off:+7.1f} %")
    points = Points(best=best, drawn=tuple(simulated(point) for point in draw(holds)))
    print(in_words(holds, points, paper))
    REGION.write_text(points.model_dump_json() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
