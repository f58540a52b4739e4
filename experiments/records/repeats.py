"""Repeated cells: their records as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiments.records.cell import Cell
from experiments.records.comparison import grouped
from experiments.records.record import Record


def once(cell: Cell) -> Cell:
    """The cell itself, of whichever of its repetitions."""
    return cell.model_copy(update={"repeat": 0})


def pooled(records: Iterable[Record]) -> list[Record]:
    """One record for all repetitions of a cell, in the order of the first of each.

    It has the whole rounds of all that ran to their end, in turn, and the mean of their phases;
    of the machine, the one whose host took most; all else is that of the first of them.
    """
    alike = grouped(records, lambda record: (once(record.cell).id, record.evidence))
    return [_as_one(group) for group in alike]


def _as_one(group: list[Record]) -> Record:
    if len(group) == 1:
        return group[0]
    ran = [record for record in group if record.measurement is not None] or group[:1]
    first, cell = ran[0], once(ran[0].cell)
    steps = [seconds for r in ran if r.measurement for seconds in r.measurement.in_whole_rounds]
    phases = [r.measurement.phase_seconds for r in ran if r.measurement]
    measured = first.measurement and first.measurement.model_copy(
        update={"step_seconds": steps, "phase_seconds": _mean([each for each in phases if each])}
    )
    known = [record.machine for record in ran if record.machine is not None]
    return first.model_copy(
        update={
            "cell": cell,
            "cell_id": cell.id,
            "measurement": measured,
            "machine": max(known, key=lambda machine: machine.steal_share, default=None),
            "seconds": sum(record.seconds for record in group),
        }
    )


def _mean(phases: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    if not phases:
        return None
    return {name: sum(each[name] for each in phases) / len(phases) for name in phases[0]}
