"""What a claim is compared with: a closed set of ways to get one number from records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from analysis import text
from experiments.records import Cell, Evidence, Measurement, Record, State, Strict, Tuning

#: Bytes are those of a step. The first line's leave the busiest node, by the kernel's counters or
#: the simulator; the second line's are the strategy's own count, its ledger.
Quantity = Literal[
    "tokens_per_s", "inter_node_bytes", "inter_node_bytes_over_least", "all_nodes_bytes",
    "gather_bytes", "backward_gather_bytes", "all_nodes_forward_bytes", "all_nodes_backward_bytes",
    "peak_device_bytes", "host_cache_share",
]  # fmt: skip
#: What a number is written in, and what a number in basic units (a ratio, bytes) is multiplied by.
Unit = Literal["×", "%", "GB", "MB", "tokens/s", "TFLOPS", "words/s", "perplexity", "servers"]
SCALES: dict[Unit, float] = {"×": 1, "%": 100, "GB": 1e-9, "MB": 1e-6, "tokens/s": 1}
#: Of several numbers; the middle one unless a claim says "up to" or "at least".
Take = Literal["max", "min", "median"]
_TAKE: dict[Take, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "median": median}

_LINK = re.compile(r"unshaped|\d+(\.\d+)? [MG]bit/s")
#: How a selection names what a cell has under another name.
_FIELDS = {"link": "inter_bandwidth_bits_per_s"}
#: What may differ between cells that are compared: none of it changes what a step is.
_APART = ("steps", "warmup_steps", "timeout_s")


class Selection(Strict):
    """Cells that have all of these settings; what is not given may be anything."""

    strategy: str | None = None
    tuning: Tuning | None = None
    model: str | None = None
    #: As tables write it, such as ``8.5 Mbit/s`` or ``unshaped``.
    link: str | None = None
    nodes: int | None = Field(default=None, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    accumulation: int | None = Field(default=None, ge=1)
    policy: str | None = None

    @field_validator("link")
    @classmethod
    def _is_a_link(cls, value: str | None) -> str | None:
        if value is not None and not _LINK.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a link; allowed: unshaped, or a number and Mbit/s or Gbit/s"
            )
        return value

    @model_validator(mode="after")
    def _selects(self) -> Selection:
        if not self.settings:
            raise ValueError(f"is empty; allowed are {', '.join(Selection.model_fields)}")
        return self

    @property
    def settings(self) -> dict[str, object]:
        """What is asked for, by setting."""
        return self.model_dump(exclude_none=True)

    def matches(self, cell: Cell) -> bool:
        """Whether the cell has all that is asked for."""
        return all(_setting(cell, name) == value for name, value in self.settings.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())


@dataclass(frozen=True)
class Sample:
    """One number from records, in basic units, and the cell it is of."""

    value: float
    cell: Cell
    evidence: Evidence


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

    def samples(self, records: Sequence[Record]) -> list[Sample]:
        found = []
        for a, b in _pairs(records, self.of, self.over):
            top, bottom = quantity(a, self.quantity), quantity(b, self.quantity)
            if top is None or not bottom:
                continue
            ratio = top / bottom
            value = {"ratio": ratio, "reduction": 1 - ratio, "gain": ratio - 1}[self.kind]
            found.append(Sample(value, a.cell, a.evidence))
        return found


class Value(Strict):
    """A quantity itself."""

    kind: Literal["value"]
    quantity: Quantity
    of: Selection
    take: Take = "median"

    @property
    def units(self) -> tuple[Unit, ...]:
        if self.quantity == "tokens_per_s":
            return ("tokens/s",)
        return ("GB", "MB") if self.quantity.endswith("bytes") else ("×", "%")

    def samples(self, records: Sequence[Record]) -> list[Sample]:
        chosen = [record for record in records if self.of.matches(record.cell)]
        values = [(record, quantity(record, self.quantity)) for record in chosen]
        return [Sample(v, r.cell, r.evidence) for r, v in values if v is not None]


class LossDifference(Strict):
    """The largest difference of a step's loss from the other cell's, relative to the latter."""

    kind: Literal["loss_difference"]
    of: Selection
    over: Selection
    take: Take = "max"

    @property
    def units(self) -> tuple[Unit, ...]:
        return ("%",)

    def samples(self, records: Sequence[Record]) -> list[Sample]:
        found = []
        for a, b in _pairs(records, self.of, self.over):
            if a.measurement is None or b.measurement is None:
                continue
            steps = list(zip(a.measurement.losses, b.measurement.losses, strict=False))
            if steps:
                apart = max(abs(ours - theirs) / theirs for ours, theirs in steps)
                found.append(Sample(apart, a.cell, a.evidence))
        return found


class Outcome(Strict):
    """The share of cells that end in a state, such as ``oom``."""

    kind: Literal["outcome"]
    of: Selection
    state: State
    take: Literal["mean"] = "mean"

    @property
    def units(self) -> tuple[Unit, ...]:
        return ("%",)

    def samples(self, records: Sequence[Record]) -> list[Sample]:
        # What a matrix leaves out did not end in any state, unless that is what is asked for.
        ran = [
            record
            for record in records
            if self.of.matches(record.cell)
            and (record.state == self.state or record.state != "skipped")
        ]
        return [Sample(float(r.state == self.state), r.cell, r.evidence) for r in ran]


Computation = Annotated[Ratio | Value | LossDifference | Outcome, Field(discriminator="kind")]


def taken(samples: Sequence[Sample], take: Take | Literal["mean"]) -> float:
    """One number of several, in basic units; there must be one at least."""
    values = [sample.value for sample in samples]
    return sum(values) / len(values) if take == "mean" else _TAKE[take](values)


def quantity(record: Record, name: Quantity) -> float | None:
    """A record's quantity in basic units (a share, bytes a step); ``None`` if it has none."""
    measured = record.measurement
    if name == "tokens_per_s" or measured is None:
        return record.tokens_per_s
    return _QUANTITIES[name](record.cell, measured)


def _ledger(measured: Measurement, *phases: str) -> float | None:
    """Bytes that a node sends to others in these phases; ``None`` without a ledger."""
    ledger = measured.ledger_bytes_per_step
    if ledger is None or "inter_node" not in ledger:
        return None
    return sum(ledger["inter_node"].get(phase, 0.0) for phase in phases)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _gathered_model_bytes(cell: Cell, measured: Measurement) -> float:
    """W parameters in the type that is gathered."""
    return measured.parameters * {"float32": 4, "bfloat16": 2}[cell.dtype]


# The nodes of a cluster send alike, so that all of them send the busiest one's bytes.
_QUANTITIES: dict[Quantity, Callable[[Cell, Measurement], float | None]] = {
    "inter_node_bytes": lambda c, m: m.inter_node_bytes_per_step,
    "inter_node_bytes_over_least": lambda c, m: _over(
        m.inter_node_bytes_per_step, m.inter_node_bytes_closed_form
    ),
    "all_nodes_bytes": lambda c, m: m.inter_node_bytes_per_step * c.cluster.nodes,
    "gather_bytes": lambda c, m: _ledger(m, "forward", "backward"),
    "backward_gather_bytes": lambda c, m: _ledger(m, "backward"),
    "all_nodes_forward_bytes": lambda c, m: _times(_ledger(m, "forward"), c.cluster.nodes),
    "all_nodes_backward_bytes": lambda c, m: _times(
        _ledger(m, "backward", "reduce"), c.cluster.nodes
    ),
    "peak_device_bytes": lambda c, m: m.peak_device_bytes,
    "host_cache_share": lambda c, m: _over(
        _times(m.host_cache_bytes, c.cluster.ranks_per_node), _gathered_model_bytes(c, m)
    ),
}


def _pairs(
    records: Sequence[Record], of: Selection, over: Selection
) -> Iterator[tuple[Record, Record]]:
    """Cells of ``of``, each with the one that differs in the settings of ``over`` alone."""
    others = {
        _rest(record, over): record
        for record in records
        if over.matches(record.cell) and record.measurement is not None
    }
    for record in records:
        partner = others.get(_rest(record, over))
        if of.matches(record.cell) and record.measurement is not None and partner is not None:
            yield record, partner


def _rest(record: Record, over: Selection) -> str:
    """All settings but those that ``over`` names, and the evidence, which is never mixed."""
    named = {_FIELDS.get(name, name) for name in over.settings}
    exclude: dict[str, Any] = dict.fromkeys((*_APART, *named), True)
    exclude["cluster"] = {"port", "nodes"} if "nodes" in named else {"port"}
    return record.evidence + record.cell.model_dump_json(exclude=exclude)


def _setting(cell: Cell, name: str) -> object:
    if name == "model":
        return cell.model.name
    if name == "link":
        return text.link(cell.inter_bandwidth_bits_per_s)
    return cell.cluster.nodes if name == "nodes" else getattr(cell, name)
