"""Settings and figures of two runs, or of two cells, beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.records import settings as of_cells
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, paired
from experiments.records.record import Record


def settings(one: Record, other: Record) -> Mapping[str, tuple[str, str]]:
    """What two cells do not have in common, by label: both values in words."""
    found = {}
    for item in of_cells.described(Cell).values():
        mine, theirs = item.of(one.cell), item.of(other.cell)
        if mine != theirs and not item.name.endswith("_in_full"):
            found[item.setting.label] = item.written(mine), item.written(theirs)
    if one.evidence != other.evidence:
        found["Evidence"] = one.evidence, other.evidence
    return found


def pairs(one: Sequence[Record], other: Sequence[Record]) -> list[Comparison]:
    """The other run's cells over those that are alike but for matrix and what changes no step."""
    return [Comparison(b, a) for a, b in paired(one, reversed(other), _key)]


def _key(record: Record) -> tuple[object, ...]:
    names = of_cells.names(Cell, "condition", "subject")
    chosen = of_cells.values(record.cell, [name for name in names if name != "matrix"])
    return tuple(chosen.values())


def figures(pair: Comparison) -> Mapping[str, tuple[float | None, float | None]]:
    """Figures of what is compared with, and of the cell, in basic units by name."""
    assert pair.over is not None
    theirs = _figures(pair.of)
    return {name: (value, theirs[name]) for name, value in _figures(pair.over).items()}


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
