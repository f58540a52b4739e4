"""Computations of a claim's number from the rows of a matrix."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import mean, median
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from analysis.load.rows import Quantity, Row
from experiments.records.comparison import Comparison, paired
from experiments.records.parity import largest_difference
from experiments.records.record import State
from simulation.files import Strict
from simulation.transformer import Tuning

#: Units that numbers are written in, and the factors to them from basic units (a ratio, bytes).
Measure = Literal["×", "%", "GB", "MB", "tokens/s", "TFLOPS", "words/s", "perplexity", "servers"]
SCALES: dict[Measure, float] = {
    "×": 1,
    "%": 100,
    "GB": 1e-9,
    "MB": 1e-6,
    "tokens/s": 1,
    "words/s": 1,
    "TFLOPS": 1,
}
#: Choice among several numbers; the middle one unless a claim says "up to" or "at least".
Take = Literal["max", "min", "median"]
_TAKE: dict[Take, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "median": median}

#: Units of quantities that are neither bytes nor shares.
_UNITS: dict[Quantity, tuple[Measure, ...]] = {
    "tokens_per_s": ("tokens/s", "words/s"),
    "tokens_per_s_per_gpu": ("tokens/s",),
    "tflops": ("TFLOPS",),
}
_MORE_IS_BETTER: tuple[Quantity, ...] = ("tokens_per_s", "largest_micro_batch")

_LINK = re.compile(r"unshaped|\d+(\.\d+)? [MG]bit/s")


class Selection(Strict):
    """Cells that have all of these settings; those that are ``None`` may be anything."""

    strategy: str | None = None
    tuning: Tuning | None = None
    model: str | None = None
    #: Bandwidth as tables write it, such as ``8.5 Mbit/s`` or ``unshaped``.
    link: str | None = None
    nodes: int | None = Field(default=None, ge=1)
    #: ``any`` in ``over``, here and below: may differ, as each strategy has a value of its own.
    micro_batch: Annotated[int, Field(ge=1)] | Literal["any"] | None = None
    accumulation: int | None = Field(default=None, ge=1)
    sequence_length: int | None = Field(default=None, ge=1)
    policy: str | None = None
    #: How ranks exchange across nodes: ``flat`` is one ring over all ranks.
    exchanges: str | None = None
    learning_rate: float | None = Field(default=None, gt=0)
    #: Workers that train apart: steps per round, β, φ, and the penalty for the staleness gap.
    interval: Annotated[int, Field(ge=1)] | Literal["any"] | None = None
    outer_momentum: float | Literal["any"] | None = None
    clip: float | Literal["any"] | None = None
    penalty: str | None = None
    #: Cyclic Data Parallelism: ``v1`` or ``v2``.
    rule: str | None = None
    #: LuWu: acknowledgements, the server's pipeline, bytes of a message.
    merged: bool | None = None
    chunk_bytes: Annotated[int, Field(ge=1)] | Literal["any"] | None = None
    pipeline: str | None = None
    #: Fuyou's: when the optimizer steps, and what is swapped.
    update: str | None = None
    swap: str | None = None
    #: Fuyou's published table.
    gpus: int | None = Field(default=None, ge=1)
    ssds: int | None = Field(default=None, ge=1)

    @field_validator("link")
    @classmethod
    def _is_a_link(cls, value: str | None) -> str | None:
        if value is not None and not _LINK.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a link; allowed: unshaped, or a number and Mbit/s or Gbit/s"
            )
        return value

    @model_validator(mode="after")
    def _selects(self) -> "Selection":
        if not self.settings:
            raise ValueError(f"is empty; allowed are {', '.join(Selection.model_fields)}")
        return self

    @property
    def settings(self) -> dict[str, object]:
        """Values that are asked for, by setting."""
        return self.model_dump(exclude_none=True)

    def matches(self, row: Row) -> bool:
        """Whether the cell has all that is asked for."""
        return all(
            value in ("any", row.settings.get(name)) for name, value in self.settings.items()
        )


@dataclass(frozen=True)
class Sample:
    """One number from records, in basic units, and the cell it is of."""

    value: float
    row: Row
    #: The cell that it is compared with, if there is one.
    over: Row | None = None

    @property
    def speed(self) -> Comparison | None:
        """Both cells' speeds; ``None`` where either has none."""
        if self.row.record is None or self.over is None:
            return None
        comparison = Comparison(self.row.record, self.over.record)
        return None if comparison.ratio is None else comparison


@dataclass(frozen=True)
class Timing:
    """How certain a comparison of measured times is."""

    #: The fewest rounds of a cell.
    rounds: int
    #: The interval in basic units; with too few rounds, the range of all of them.
    interval: tuple[float, float]


class Ratio(Strict):
    """Each cell of ``of`` over the cell that differs from it in the settings of ``over`` alone.

    ``ratio`` is a/b in ×; ``reduction`` 1 − a/b and ``gain`` a/b − 1, both in %.
    """

    kind: Literal["ratio", "reduction", "gain"]
    quantity: Quantity
    of: Selection
    over: Selection
    take: Take = "median"

    @property
    def units(self) -> tuple[Measure, ...]:
        return ("×", "%") if self.kind == "ratio" else ("%",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        samples = []
        for a, b in _pairs(rows, self.of, self.over):
            top, bottom = (row.quantities.get(self.quantity) for row in (a, b))
            if a.state != "ok":  # without figures it counts as the worst
                top = 0.0 if self.quantity in _MORE_IS_BETTER else inf
            if top is None or not bottom:
                continue
            samples.append(Sample(self.of_quotient(top / bottom), a, b))
        return samples

    def timing(self, samples: Sequence[Sample]) -> Timing | None:
        """How certain the number is; ``None`` where no measured times are compared."""
        timed = [speed for of in samples if (speed := of.speed) is not None and speed.timed]
        if self.quantity != "tokens_per_s" or not timed:
            return None
        ends = [sorted(map(self.of_quotient, speed.interval or ())) for speed in timed]
        low, high = map(_TAKE[self.take], zip(*ends, strict=True))
        return Timing(min(speed.rounds for speed in timed), (low, high))

    def of_quotient(self, ratio: float) -> float:
        """A quotient as a number of this kind."""
        return {"ratio": ratio, "reduction": 1 - ratio, "gain": ratio - 1}[self.kind]

    def lacking(self, rows: Sequence[Row]) -> list[Row]:
        """Cells of compared pairs that have no figures."""
        pairs = _pairs(rows, self.of, self.over)
        return [row for pair in pairs for row in pair if row.state != "ok"]


class Value(Strict):
    kind: Literal["value"]
    quantity: Quantity
    of: Selection
    take: Take = "median"

    @property
    def units(self) -> tuple[Measure, ...]:
        if self.quantity in _UNITS:
            return _UNITS[self.quantity]
        return ("GB", "MB") if self.quantity.endswith("bytes") else ("×", "%")

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        chosen = [(row, row.quantities.get(self.quantity)) for row in rows if self.of.matches(row)]
        return [Sample(value, row) for row, value in chosen if value is not None]


class LossDifference(Strict):
    """The largest difference of a step's loss from the other cell's, relative to the latter.

    Infinite where a loss is missing or not finite.
    """

    kind: Literal["loss_difference"]
    of: Selection
    over: Selection
    take: Take = "max"
    units: ClassVar[tuple[Measure, ...]] = ("%",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [
            Sample(largest_difference(a.losses, b.losses), a, b)
            for a, b in _pairs(rows, self.of, self.over)
            if a.losses and b.losses
        ]


class Outcome(Strict):
    """The share of cells that end in a state, such as ``oom``, or in the one of their strategy."""

    kind: Literal["outcome"]
    of: Selection
    #: The state of all cells, or the states by strategy, of those that are named.
    state: State | dict[str, State]
    take: Literal["mean"] = "mean"
    units: ClassVar[tuple[Measure, ...]] = ("%",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        samples = []
        for row in filter(self.of.matches, rows):
            expected, strategy = self.state, str(row.settings["strategy"])
            state = expected.get(strategy) if isinstance(expected, dict) else expected
            # Cells that a matrix leaves out did not end in any state, unless that is asked for.
            if state is not None and (row.state != "skipped" or state == "skipped"):
                samples.append(Sample(float(row.state == state), row))
        return samples


Computation = Annotated[Ratio | Value | LossDifference | Outcome, Field(discriminator="kind")]


def taken(samples: Sequence[Sample], take: Take | Literal["mean"]) -> float:
    """One number of several, in basic units; there must be one at least."""
    values = [sample.value for sample in samples]
    return mean(values) if take == "mean" else _TAKE[take](values)


def _pairs(rows: Sequence[Row], of: Selection, over: Selection) -> Iterator[tuple[Row, Row]]:
    """Pair each cell of ``of`` with the cell that differs in the settings of ``over`` alone.

    Kinds of evidence are never mixed. Cells that a matrix skips are not compared; cells that ran
    and have no figures are.
    """
    ran = [row for row in rows if row.state != "skipped"]
    named = over.settings

    def rest(row: Row) -> tuple[object, ...]:
        return row.evidence, *(value for name, value in row.settings.items() if name not in named)

    return paired(filter(of.matches, ran), filter(over.matches, ran), rest)
