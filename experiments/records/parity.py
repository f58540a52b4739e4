"""Whether strategies learn the same: each cell's losses next to those of a reference.

Losses depend on the batches, the model and the order in which gradients are added up. Where our
reductions add in one order, they are the same bit for bit; elsewhere within a tolerance.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baselines import registry
from baselines.encoding import DIFFERENCES, EXPONENTS
from baselines.settings import CacheSettings
from experiments.records.cell import Cell
from experiments.records.record import Record
from experiments.records.settings import described

#: Strategy that others are compared with by default.
REFERENCE = "fsdp2"
#: Tolerated relative difference of a loss, for each step that was trained. Another order of a sum
#: rounds otherwise, which training amplifies; DeepSpeed also has optimizers of its own on the CPU.
_SUMMED, _DEEPSPEED, _BFLOAT16, _QUANTISED = 2.5e-7, 1e-5, 1e-4, 5e-3
#: Tolerance after any number of steps: a cell that differs by more has learned something else.
_MOST = 0.05


@dataclass(frozen=True)
class Parity:
    """A cell's losses against the reference's."""

    record: Record
    #: The largest relative difference of a step's loss; ``None`` where nothing was compared.
    difference: float | None
    problems: tuple[str, ...]


def compare(records: Sequence[Record], reference: str = REFERENCE) -> list[Parity]:
    """Compare each cell that was to train with the reference, in the order of the records.

    Cells that were skipped or simulated are left out. Raises ``ValueError`` where all were
    simulated: there are no losses.
    """
    trained = [r for r in records if r.state != "skipped" and r.evidence != "simulated"]
    if not trained and any(record.evidence == "simulated" for record in records):
        raise ValueError("all records are simulated: nothing was trained, so there are no losses")
    sound = [record for record in trained if all(map(math.isfinite, promised(record)))]
    references = _longest(record for record in sound if record.cell.strategy == reference)
    equals = _longest(record for record in sound if _adds_in_one_order(record.cell))
    parities = []
    for record in trained:
        group = _group(record)
        equal = equals.get(group) if _adds_in_one_order(record.cell) else None
        parities.append(_compare(record, reference, references.get(group), equal))
    return parities


def promised(record: Record) -> list[float]:
    """The loss of each step that the cell is to train; NaN where it is missing."""
    losses = [] if record.measurement is None else record.measurement.losses
    missing = record.cell.warmup_steps + record.cell.steps - len(losses)
    return [*losses, *[math.nan] * missing]


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest difference of a step's losses, relative to the latter, over steps that both trained.

    Infinite where a loss is not finite; there must be a step.
    """
    return max(map(_relative, ours, theirs))


def _relative(ours: float, theirs: float) -> float:
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    if ours == theirs:
        return 0.0
    return abs(ours - theirs) / abs(theirs) if theirs else math.inf


def tolerance(cell: Cell, steps: int) -> float:
    """Largest relative difference from the reference's losses that is allowed after ``steps``."""
    if quantised(cell):
        per_step = _QUANTISED
    elif cell.dtype == "bfloat16":
        per_step = _BFLOAT16
    elif registry.find(cell.strategy).engine == "deepspeed":
        per_step = _DEEPSPEED
    else:
        per_step = _SUMMED
    return min(steps * per_step, _MOST)


def _compare(record: Record, reference: str, theirs: Record | None, equal: Record | None) -> Parity:
    if record.measurement is None:
        *_, last = ["no error text", *(record.error or "").strip().splitlines()]
        return Parity(record, None, (f"did not run ({record.state}): {last}",))
    ours, losses = promised(record), record.measurement.losses
    problems = []
    if len(losses) < len(ours):
        problems.append(f"has {len(losses)} of {len(ours)} losses")
    if not all(map(math.isfinite, losses)):
        problems.append("diverged: a loss is not finite")
    sound = not problems
    difference = None
    if theirs is None:
        problems.append(f"was not compared: no {reference} trained with the same settings")
    else:
        others = promised(theirs)
        difference = largest_difference(ours, others)
        allowed = tolerance(record.cell, min(len(ours), len(others)))
        if sound and difference > allowed:
            apart = [_relative(*both) > allowed for both in zip(ours, others, strict=False)]
            first = apart.index(True) + 1
            problems.append(f"learns something else, which step {first} shows first")
    if sound and equal is not None and largest_difference(ours, promised(equal)) > 0:
        name = equal.cell.strategy
        problems.append(f"is not bit for bit {name}, which adds up in the same order")
    return Parity(record, difference, tuple(problems))


def _adds_in_one_order(cell: Cell) -> bool:
    """Whether this cell's gradients are added up in the order of ``zero3``, unquantised.

    Strategies that reduce by the library do: a cache changes no sum. ``mics``, flat
    exchanges and replicated parameters have reductions of their own. With at most two nodes of two
    ranks no sum inside or across nodes has more than two terms, which have one order only; but
    replicated gradients are summed over micro-batches first.
    """
    schedule, several = registry.find(cell.strategy).schedule, cell.accumulation > 1
    if schedule is None or not schedule.pairwise or quantised(cell):
        return False
    if isinstance(cell.settings, CacheSettings):
        chosen = cell.settings
        schedule = schedule.exchanging(chosen.exchanges, chosen.partial_gradients)
    # Otherwise summed over nodes before micro-batches.
    deferred = schedule.accumulates_without_sync or not several
    if not (schedule.hierarchical and deferred):
        return False
    if schedule.shards == "world":
        return True
    pairs = max(cell.cluster.nodes, cell.cluster.ranks_per_node) <= 2
    return pairs and cell.dtype == "float32" and not (schedule.shards == "rank" and several)


def quantised(cell: Cell) -> bool:
    """Whether what crosses nodes is rounded, by its strategy or by a codec that it chooses."""
    bounded = registry.find(cell.strategy).numerics == "bounded"
    return bounded or any(
        getattr(cell.settings, name, "none") not in ("none", *DIFFERENCES, *EXPONENTS)
        for name in ("gather_codec", "reduce_codec")
    )


def _longest(records: Iterable[Record]) -> dict[tuple[object, ...], Record]:
    """The cell of each group that trained most steps: most can be compared with it."""
    longest: dict[tuple[object, ...], Record] = {}
    for record in sorted(records, key=lambda record: -len(promised(record))):
        longest.setdefault(_group(record), record)
    return longest


def _group(record: Record) -> tuple[object, ...]:
    """Settings shared by cells that train the same parameters on the same batches."""
    learned = (item for item in described(Cell).values() if item.setting.learns)
    return record.evidence, *(item.of(record.cell) for item in learned)
