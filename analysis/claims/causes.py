"""Reasons that are computed: one setting is changed, and the claim with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.claims.computations import Computation, Ratio, Sample, Selection
from analysis.load.rows import Row
from experiments.records import settings
from experiments.records.cell import Cell, MatrixName
from experiments.records.settings import Described
from simulation.files import Name, Strict


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
    """What a claim is computed from, as it was and with the setting changed."""

    before: tuple[Sample, ...]
    after: tuple[Sample, ...]
    #: The values that the setting had.
    was: tuple[object, ...]


def setting_of(cause: Cause) -> Described:
    """What the setting says of itself; ``ValueError`` if cells have no such setting."""
    every = settings.described(Cell)
    if cause.setting not in every:
        raise ValueError(f"{cause.setting!r} is no setting of a cell; allowed: {', '.join(every)}")
    return every[cause.setting]


def changed(
    cause: Cause, compute: Computation, rows: Sequence[Row], others: Sequence[Row]
) -> Change | None:
    """The claim on the cells that have a counterpart among ``others``, and on these counterparts.

    A counterpart has the other value, and all other settings alike. ``None`` where there is none.
    """
    by_rest = {_rest(row, cause): row for row in others if row.settings[cause.setting] == cause.to}
    before: list[Row] = []
    after: list[Row] = []
    was: list[object] = []
    for row in rows:
        counterpart = by_rest.get(_rest(row, cause))
        if not _is_altered(row, cause, compute):
            before.append(row)
            after.append(row)
        elif counterpart is not None:
            before.append(row)
            # It stands in its place, so that it is compared as that is.
            after.append(replace(counterpart, settings=row.settings))
            was.append(_shown(row.settings)[cause.setting])
    found = [tuple(compute.samples(of)) for of in (before, after)]
    if not was or not all(found):
        return None
    return Change(found[0], found[1], tuple(dict.fromkeys(was)))


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
    every = dict(chosen)
    if every.get("inter_efficiency") is None:
        every["inter_efficiency"] = every.get("link_efficiency")
    return every
