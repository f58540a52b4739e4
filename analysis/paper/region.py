"""A search for what would have to be true of the paper's cluster for its numbers to hold together.

    python -m analysis.paper.region

The paper's system (flat exchanges) is simulated; what the paper does not say is in
``unknowns.yaml``. What is found is in ``region.json``.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import Field, model_validator

from analysis.claims import papers
from simulation import yaml_lines
from simulation.files import Name, Strict
from simulation.hardware import cluster
from simulation.prediction import Prediction, predict
from simulation.transformer import Transformer
from simulation.workload import Workload

UNKNOWNS = Path(__file__).with_name("unknowns.yaml")
FOUND = Path(__file__).with_name("region.json")
#: Depth and width are our choice: simulation/models.py says why.
_MODEL = Transformer(
    name="gpt-30b", family="gpt2", layers=48, width=7040, heads=110, vocabulary=50257,
    positions=2048, mlp_width=4 * 7040, key_value_heads=110, tied=True,
)  # fmt: skip
_FAST, _SLOW = 100e9, 1e9
#: Rounds over all unknowns, from the middle of their ranges.
_ROUNDS = 3
#: Values tried of an unknown that is between two, in each round; later ones are nearer.
_TRIED = 5

#: The value of each unknown.
Point = Mapping[str, float]


class Unknown(Strict):
    """What the paper does not say, what it may be, and where that comes from."""

    values: tuple[float, ...] = ()
    between: tuple[float, float] | None = None
    source: str

    @model_validator(mode="after")
    def _has_a_range(self) -> Unknown:
        if bool(self.values) == bool(self.between):
            raise ValueError("has values, or is between two; one of them")
        return self

    def near(self, value: float, width: float) -> list[float]:
        """What it may be within this share of its range around a value."""
        if self.between is None:
            return list(self.values)
        low, high = self.between
        half = width * (high - low) / 2
        steps = (value + half * (2 * at / (_TRIED - 1) - 1) for at in range(_TRIED))
        return sorted({round(min(max(step, low), high), 2) for step in steps})


class Unknowns(Strict):
    """The file."""

    seed: int
    unknowns: dict[Name, Unknown]
    #: By claim.
    tolerances: dict[Name, float] = Field(min_length=1)


def load(path: Path = UNKNOWNS) -> Unknowns:
    """Read the file; ``ValueError`` for a mistake in it."""
    return Unknowns.model_validate(yaml_lines.load(path).values)


@cache
def _predicted(
    strategy: str, experiment: str, policy: str, bits: float, share: float,
    peak: float, pcie: float, micro_batch: int, length: int, recomputed: float,
) -> Prediction:  # fmt: skip
    full = experiment == "full"
    workload = Workload(
        strategy=strategy,
        model=_MODEL,
        lora=None if full else _MODEL.attention_lora(8),
        sequence_length=length,
        micro_batch=micro_batch,
        recomputed=recomputed,
        policy=policy,
        exchanges="flat" if strategy == "fcdp" else "hierarchical",
    )
    hardware = cluster(
        "a40", nodes=4 if full else 2, ranks_per_node=8, inter_bits_per_s=bits,
        matmul_efficiency=peak, link_efficiency=pcie, inter_efficiency=share,
    )  # fmt: skip
    return predict(workload, hardware)


def numbers(point: Point) -> dict[str, float]:
    """The claims' numbers at a point, in their units; NaN where a system is out of memory."""

    def cell(strategy: str, of: str, *, policy: str = "host", bits: float = _FAST) -> Prediction:
        share = point["fast_share" if bits == _FAST else "slow_share"]
        batch = int(point.get(f"{of}_micro_batch", 8))
        length, again = int(point[f"{of}_length"]), point[f"{of}_recomputed"]
        peak, pcie = point["peak_share"], point["pcie_share"]
        return _predicted(strategy, of, policy, bits, share, peak, pcie, batch, length, again)

    def over(a: Prediction, b: Prediction) -> float:
        return a.tokens_per_s / b.tokens_per_s if a.state == b.state == "ok" else math.nan

    zero3, hpz, full = (cell(one, "full") for one in ("deepspeed-zero3", "deepspeed-hpz", "fcdp"))
    table = cell("deepspeed-zero3", "table")
    fast = {one: cell(one, "bandwidth") for one in ("deepspeed-zero3", "fsdp2-reshard", "fcdp")}
    slow = {one: cell(one, "bandwidth", bits=_SLOW) for one in fast}
    sent = {one: 2 * found.inter_node_bytes / 1e9 for one, found in fast.items()}
    ends = [hpz.state == "oom", zero3.state == "ok", full.state == "ok"]
    return {
        "fcdp-volume-zero3-total": sent["deepspeed-zero3"],
        "fcdp-volume-zeropp-total": sent["fsdp2-reshard"],
        "fcdp-volume-comm-total": sent["fcdp"],
        "fcdp-full-gain": 100 * (over(full, zero3) - 1),
        "fcdp-zeropp-oom-30b": 100 * sum(ends) / len(ends),
        "fcdp-lora-6x": over(cell("fcdp", "table"), table),
        "fcdp-lora-7x-adaptive": over(cell("fcdp", "table", policy="auto"), table),
        "fcdp-lora-implied": over(fast["fcdp"], fast["deepspeed-zero3"]),
        "fcdp-100x-zero3": over(slow["fcdp"], slow["deepspeed-zero3"]),
        "fcdp-51x-zeropp": over(slow["fcdp"], slow["fsdp2-reshard"]),
        "fcdp-zero3-loses-speed": 100 * over(slow["deepspeed-zero3"], fast["deepspeed-zero3"]),
        "fcdp-keeps-speed": 100 * over(slow["fcdp"], fast["fcdp"]),
    }


def papers_numbers() -> dict[str, float]:
    """The paper's; of how systems end, that all end so."""
    return {c.id: 100.0 if c.number is None else c.number for c in papers.load().claims}


def away(point: Point, paper: Mapping[str, float]) -> dict[str, float]:
    """How far ours is from each number of the paper, as a share; infinite where ours has none."""
    found = {name: abs(value / paper[name] - 1) for name, value in numbers(point).items()}
    return {name: math.inf if math.isnan(value) else value for name, value in found.items()}


def search(holds: Unknowns) -> dict[str, float]:
    """The point at which the most numbers are within their tolerances; of these, the nearest."""
    drawn, paper = random.Random(holds.seed), papers_numbers()

    def badness(point: Point) -> tuple[int, float]:
        by = {name: value / holds.tolerances[name] for name, value in away(point, paper).items()}
        return sum(value > 1 for value in by.values()), sum(min(v, 10.0) for v in by.values())

    point = {name: _middle(one) for name, one in holds.unknowns.items()}
    for turn in range(_ROUNDS):
        for name, one in drawn.sample(list(holds.unknowns.items()), len(holds.unknowns)):
            tried = [{**point, name: value} for value in one.near(point[name], 0.8 / 2**turn)]
            point = min([point, *tried], key=badness)
    return point


def _middle(unknown: Unknown) -> float:
    if unknown.between is None:
        return unknown.values[len(unknown.values) // 2]
    return round(sum(unknown.between) / 2, 2)


def in_words(path: Path = FOUND) -> str:
    """The committed point, and how many of the numbers hold together there."""
    found, holds, paper = json.loads(path.read_text(encoding="utf-8")), load(), papers_numbers()
    ours: Mapping[str, float] = found["numbers"]
    near = {name: abs(value / paper[name] - 1) for name, value in ours.items()}
    within = sum(share <= holds.tolerances[name] for name, share in near.items())
    at = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in found["point"].items())
    return f"{within} of {len(ours)} numbers within their tolerances, at {at}"


def main() -> None:
    """Search, and write what was found."""
    holds = load()
    point, paper = search(holds), papers_numbers()
    ours, off = numbers(point), away(point, paper)
    within = [name for name, value in off.items() if value <= holds.tolerances[name]]
    for name, value in ours.items():
        print(f"{name:28} {value:10.4g} {paper[name]:10.4g} {100 * off[name]:6.1f} %")
    print(f"{len(within)} of {len(ours)} within their tolerances; {point}")
    near = sum(value <= 0.15 for value in off.values())
    print(f"{near} within 15 %")
    found = {"point": point, "numbers": {name: round(value, 6) for name, value in ours.items()}}
    FOUND.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
