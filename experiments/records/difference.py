"""What two runs, or two cells, differ in: settings, figures, and whether beyond the spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.record import Record
from experiments.records.repeats import within_spread
from experiments.records.settings import described


@dataclass(frozen=True)
class Pair:
    """A cell of one run and the same cell of another, or any two cells."""

    one: Record
    other: Record

    @property
    def settings(self) -> Mapping[str, tuple[str, str]]:
        """What they do not have in common, by label: both values in words."""
        found = {}
        for item in described(Cell).values():
            mine, theirs = item.of(self.one.cell), item.of(self.other.cell)
            if mine != theirs and not item.name.endswith("_in_full"):
                found[item.setting.label] = item.written(mine), item.written(theirs)
        if self.one.evidence != self.other.evidence:
            found["Evidence"] = self.one.evidence, self.other.evidence
        return found

    @property
    def figures(self) -> Mapping[str, tuple[float | None, float | None]]:
        """Figures of both in basic units, by name."""
        return {
            name: (values, _figures(self.other)[name])
            for name, values in _figures(self.one).items()
        }

    @property
    def times_as_fast(self) -> float | None:
        """The other's tokens per second over the one's."""
        mine, theirs = self.one.tokens_per_s, self.other.tokens_per_s
        return theirs / mine if mine and theirs else None

    @property
    def beyond_spread(self) -> bool:
        """Whether their steps' times differ by more than the spread."""
        return self.times_as_fast is not None and not within_spread(self.one, self.other)


def pairs(one: Sequence[Record], other: Sequence[Record]) -> list[Pair]:
    """Cells of two runs that are alike but for their matrix and what changes nothing of a step."""
    theirs = {_key(record): record for record in reversed(other)}
    return [Pair(record, theirs[key]) for record in one if (key := _key(record)) in theirs]


def _key(record: Record) -> tuple[object, ...]:
    names = settings.names(Cell, "condition", "subject")
    chosen = settings.values(record.cell, [name for name in names if name != "matrix"])
    return tuple(chosen.values())


def _figures(record: Record) -> dict[str, float | None]:
    measured = record.measurement
    cache = measured.cache if measured else None
    return {
        "s/step": record.step_seconds_median,
        "tokens/s": record.tokens_per_s,
        "MB/step sent": _mega(measured and measured.inter_node_bytes_per_step),
        "peak host MB": _mega(measured and measured.peak_host_bytes),
        "peak device MB": _mega(measured and measured.peak_device_bytes),
        "hits/step": cache.hits_per_step if cache else None,
        "misses/step": cache.misses_per_step if cache else None,
        "last loss": measured.losses[-1] if measured and measured.losses else None,
    }


def _mega(count: float | object | None) -> float | None:
    return count / 1e6 if isinstance(count, int | float) else None
