"""How a claim is compared with records: ways to get one number from rows, and what alters it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import mean, median
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from analysis.load.rows import Quantity, Row
from experiments.records import settings
from experiments.records.cell import Cell, MatrixName
from experiments.records.comparison import Comparison, paired
from experiments.records.parity import largest_difference
from experiments.records.record import State
from experiments.records.settings import Described
from simulation.files import Name, Strict
from simulation.transformer import Tuning

#: Units that numbers are written in, and the factor of a number in basic units (a ratio, bytes).
Unit = Literal["×", "%", "GB", "MB", "tokens/s", "TFLOPS", "words/s", "perplexity", "servers"]
SCALES: dict[Unit, float] = {
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
_UNITS: dict[Quantity, tuple[Unit, ...]] = {
    "tokens_per_s": ("tokens/s", "words/s"),
    "tokens_per_s_per_gpu": ("tokens/s",),
    "tflops": ("TFLOPS",),
}
_MORE_IS_BETTER: tuple[Quantity, ...] = ("tokens_per_s", "largest_micro_batch")

_LINK = re.compile(r"unshaped|\d+(\.\d+)? [MG]bit/s")


class Selection(Strict):
    """Cells that have all of these settings; what is not given may be anything."""

    strategy: str | None = None
    tuning: Tuning | None = None
    model: str | None = None
    #: As tables write it, such as ``8.5 Mbit/s`` or ``unshaped``.
    link: str | None = None
    nodes: int | None = Field(default=None, ge=1)
    #: ``any`` in ``over``, here and below: whichever it is, where each strategy has one of its own.
    micro_batch: Annotated[int, Field(ge=1)] | Literal["any"] | None = None
    accumulation: int | None = Field(default=None, ge=1)
    sequence_length: int | None = Field(default=None, ge=1)
    policy: str | None = None
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
    #: Partner that it is compared with, if there is one.
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
    """How sure a comparison of times is that were read from clocks."""

    #: The fewest of all cells, and whether all have enough to decide anything.
    rounds: int
    enough: bool
    #: In basic units; of too few rounds, all of them.
    interval: tuple[float, float]


class Ratio(Strict):
    """Each cell of ``of`` against the cell that differs from it in ``over`` alone.

    ``ratio`` is a/b in ×; ``reduction`` 1 − a/b and ``gain`` a/b − 1, both in %.
    """

    kind: Literal["ratio", "reduction", "gain"]
    quantity: Quantity
    of: Selection
    over: Selection
    take: Take = "median"

    @property
    def units(self) -> tuple[Unit, ...]:
        return ("×", "%") if self.kind == "ratio" else ("%",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        samples = []
        for a, b in _pairs(rows, self.of, self.over):
            top, bottom = (row.quantities.get(self.quantity) for row in (a, b))
            if a.state != "ok":  # it left no figures, and is as bad as can be
                top = 0.0 if self.quantity in _MORE_IS_BETTER else inf
            if top is None or not bottom:
                continue
            samples.append(Sample(self.of_quotient(top / bottom), a, b))
        return samples

    def timing(self, samples: Sequence[Sample]) -> Timing | None:
        """How sure the number is; ``None`` where no times are compared, or they were computed."""
        timed = [speed for of in samples if (speed := of.speed) is not None and speed.timed]
        if self.quantity != "tokens_per_s" or not timed:
            return None
        ends = [sorted(map(self.of_quotient, speed.interval or ())) for speed in timed]
        low, high = map(_TAKE[self.take], zip(*ends, strict=True))
        enough = all(speed.decides for speed in timed)
        return Timing(min(speed.rounds for speed in timed), enough, (low, high))

    def of_quotient(self, ratio: float) -> float:
        """The number of this kind that a quotient is."""
        return {"ratio": ratio, "reduction": 1 - ratio, "gain": ratio - 1}[self.kind]

    def lacking(self, rows: Sequence[Row]) -> list[Row]:
        """Cells that left no figures where the other of two did, or neither did."""
        pairs = _pairs(rows, self.of, self.over)
        return [row for pair in pairs for row in pair if row.state != "ok"]


class Value(Strict):
    kind: Literal["value"]
    quantity: Quantity
    of: Selection
    take: Take = "median"

    @property
    def units(self) -> tuple[Unit, ...]:
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
    units: ClassVar[tuple[Unit, ...]] = ("%",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [
            Sample(largest_difference(a.losses, b.losses), a, b)
            for a, b in _pairs(rows, self.of, self.over)
            if a.losses and b.losses
        ]


class Outcome(Strict):
    """The share of cells that end in a state, such as ``oom``, or each in that of its strategy."""

    kind: Literal["outcome"]
    of: Selection
    #: State of all cells; or by strategy, of those that are named.
    state: State | dict[str, State]
    take: Literal["mean"] = "mean"
    units: ClassVar[tuple[Unit, ...]] = ("%",)

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
    """Cells of ``of``, each with the one that differs in the settings of ``over`` alone.

    Evidence is never mixed. Cells that a matrix leaves out have no part in a comparison; those that
    left no figures have.
    """
    ran = [row for row in rows if row.state != "skipped"]
    named = over.settings

    def rest(row: Row) -> tuple[object, ...]:
        return row.evidence, *(value for name, value in row.settings.items() if name not in named)

    return paired(filter(of.matches, ran), filter(over.matches, ran), rest)


class Cause(Strict):
    """A setting that is said to be why; cells that differ in it alone show whether it is."""

    #: Where the cells with the other value are.
    matrix: MatrixName
    setting: Name
    to: bool | int | float | str
    #: Whether it is changed in all that are compared, or in the cells of one selection alone.
    side: Literal["both", "of", "over"] = "both"


@dataclass(frozen=True)
class Change:
    """Rows that a claim is computed from, as they were and with the setting changed."""

    before: tuple[Sample, ...]
    after: tuple[Sample, ...]
    #: The values that the setting had.
    was: tuple[object, ...]


def setting_of(cause: Cause) -> Described:
    """The setting's description; ``ValueError`` if cells have no such setting."""
    known = settings.described(Cell)
    if cause.setting not in known:
        raise ValueError(f"{cause.setting!r} is no setting of a cell; allowed: {', '.join(known)}")
    return known[cause.setting]


def changed(
    cause: Cause, compute: Computation, rows: Sequence[Row], others: Sequence[Row]
) -> Change | None:
    """The claim on the cells that have a counterpart among ``others``, and on these counterparts.

    A counterpart has the other value, and all other settings alike. ``None`` where there is none.
    """
    by_rest = {_rest(row, cause): row for row in others if row.settings[cause.setting] == cause.to}
    both: list[tuple[Row, Row]] = []
    was: list[object] = []
    for row in rows:
        counterpart = by_rest.get(_rest(row, cause))
        if not _is_altered(row, cause, compute):
            both.append((row, row))
        elif counterpart is not None:
            # It stands in its place, so that it is compared as that is.
            both.append((row, replace(counterpart, settings=row.settings)))
            was.append(_shown(row.settings)[cause.setting])
    if not was:
        return None
    before, after = (tuple(compute.samples(of)) for of in zip(*both, strict=True))
    return Change(before, after, tuple(dict.fromkeys(was))) if before and after else None


def _is_altered(row: Row, cause: Cause, compute: Computation) -> bool:
    """Whether a cell is among those that the setting is changed in."""
    if not isinstance(compute, Ratio):
        return compute.of.matches(row)
    sides: dict[str, Selection] = {"of": compute.of, "over": compute.over}
    if cause.side != "both":
        # Another selection's cells are those that it does not share with this one.
        other = sides["over" if cause.side == "of" else "of"]
        return sides[cause.side].matches(row) and not other.matches(row)
    return any(side.matches(row) for side in sides.values())


def _rest(row: Row, cause: Cause) -> tuple[object, ...]:
    """All settings but the one that is changed."""
    return tuple(
        value
        for name, value in _shown(row.settings).items()
        if name not in ("matrix", cause.setting)
    )


def _shown(chosen: Mapping[str, object]) -> dict[str, object]:
    """Settings as they are in effect: the link between nodes by default as the others."""
    effective = dict(chosen)
    if effective.get("inter_efficiency") is None:
        effective["inter_efficiency"] = effective.get("link_efficiency")
    return effective
