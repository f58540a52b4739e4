"""Rivals of FCDP: exact strategies that ran beside it, and which of them are faster."""

from collections.abc import Iterable, Sequence

from analysis import strategies, text
from baselines import registry
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, groups
from experiments.records.parity import quantised
from experiments.records.record import Record
from simulation.quantities import format_link


def is_exact(record: Record) -> bool:
    """Whether the cell trains as FSDP2 does but for the order of sums."""
    numerics = registry.find(record.cell.strategy).numerics
    return numerics == "exact" and not quantised(record.cell)


def ran(group: Iterable[Record]) -> list[Record]:
    """Exact strategies of a comparison that have a speed, the fastest first, without FCDP's."""
    rivals = [
        record
        for record in group
        if record.tokens_per_s
        and is_exact(record)
        and not record.cell.strategy.startswith(strategies.SUBJECT)
    ]
    return sorted(rivals, key=lambda record: -(record.tokens_per_s or 0.0))


def best(group: Iterable[Record]) -> Record | None:
    """The fastest rival of a comparison; ``None`` where none ran."""
    return next(iter(ran(group)), None)


def faster(group: Sequence[Record]) -> list[Comparison]:
    """Rivals that are faster than FCDP with its defaults beyond their interval, fastest first."""
    ours = next((record for record in group if record.cell.subject == strategies.SUBJECT), None)
    over = (Comparison(rival, ours) for rival in ran(group))
    return [pair for pair in over if pair.differs and pair.decides and (pair.ratio or 0) > 1]


def condition(cell: Cell) -> str:
    """Tuning and micro-batches per step, in which comparisons of one model and link differ."""
    return f"{cell.tuning}, k\u00a0=\u00a0{cell.accumulation}"


def in_words(records: Sequence[Record]) -> str:
    """Name the rivals that are faster than FCDP, where and by how much, then all others.

    Records are of one link; empty without any.
    """
    rivals = {label(of): list[str]() for group in groups(records) for of in ran(group)}
    for pair in (pair for group in groups(records) for pair in faster(group)):
        rivals[label(pair.of)].append(f"{condition(pair.of.cell)}: {text.compared(pair)}")
    if not rivals:
        return ""
    link = format_link(records[0].cell.inter_bandwidth_bits_per_s)
    ahead = [f"{name} ({'; '.join(where)})" for name, where in rivals.items() if where]
    behind = [name for name, where in rivals.items() if not where]
    return (
        f"Faster than FCDP beyond the interval, emulated at {link}: {', '.join(ahead) or 'none'}. "
        f"Not faster: {', '.join(behind) or 'none'}."
    )


def label(record: Record) -> str:
    """Name of what is compared: the strategy with its settings."""
    return strategies.label(record.cell.subject)
