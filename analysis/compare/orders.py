"""Whether the simulator orders what was run: pairs of cells, and what its choice would have cost.

Cells are compared that differ in strategy and its settings alone; repetitions of one count as one.
A pair are two whose times differ by more than ``_APART`` and beyond their interval: of others the
records do not say which is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from analysis import text
from baselines import registry
from experiments.records.cell import Cell
from experiments.records.comparison import Comparison, groups
from experiments.records.parity import quantised
from experiments.records.record import Record
from experiments.records.repeats import once, pooled

_APART = 0.15


@dataclass(frozen=True)
class Timed:
    """A cell's seconds per step, as they were and as they are predicted."""

    record: Record
    seconds: float
    predicted: float

    @property
    def name(self) -> str:
        return self.record.cell_id


@dataclass(frozen=True)
class Order:
    """How well one matrix is ordered."""

    matrix: str
    #: Whether times of it may be read: nothing else ran beside its cells, as far as is known.
    quiet: bool
    pairs: int
    wrong: tuple[tuple[Timed, Timed], ...]
    #: Relative cost of taking the predicted fastest of strategies that train the same, each with
    #: what was taken and the fastest.
    costs: tuple[tuple[float, Timed, Timed], ...]

    @property
    def right(self) -> int:
        return self.pairs - len(self.wrong)


def order(
    matrix: str, records: Sequence[Record], predictions: Sequence[Record], readable: bool
) -> Order | None:
    """The order of a matrix's emulated cells; ``None`` where none can be compared.

    ``readable`` says whether its times may be read at all.
    """
    predicted = {once(record.cell).id: record.step_seconds_median for record in predictions}
    emulated = pooled(record for record in records if record.evidence == "emulated")
    timed = [
        [
            Timed(record, seconds, expected)
            for record in group
            if (seconds := record.step_seconds_median) is not None
            and (expected := predicted.get(record.cell_id)) is not None
        ]
        for group in groups(emulated)
    ]
    machines = [cell.record.machine for cells in timed for cell in cells]
    quiet = readable and not any(machine and machine.why_busy for machine in machines)
    pairs = [pair for cells in timed for pair in _pairs(cells)]
    costs = [cost for cells in timed if (cost := _cost(cells)) is not None]
    if not pairs and not costs:
        return None
    wrong = tuple(pair for pair in pairs if pair[0].predicted >= pair[1].predicted)
    return Order(matrix, quiet, len(pairs), wrong, tuple(costs))


def _pairs(cells: Sequence[Timed]) -> Iterator[tuple[Timed, Timed]]:
    """Pairs, the faster first."""
    for pair in combinations(sorted(cells, key=lambda cell: cell.seconds), 2):
        fast, slow = pair
        apart = slow.seconds > (1 + _APART) * fast.seconds
        if apart and Comparison(fast.record, slow.record).differs:
            yield fast, slow


def _cost(cells: Sequence[Timed]) -> tuple[float, Timed, Timed] | None:
    """What the predicted fastest costs; of several that are predicted alike, the slowest."""
    same = [cell for cell in cells if _trains_the_same(cell.record.cell)]
    if len(same) < 2:
        return None
    fastest = min(same, key=lambda cell: cell.seconds)
    taken = min(same, key=lambda cell: (cell.predicted, -cell.seconds))
    return taken.seconds / fastest.seconds - 1, taken, fastest


def _trains_the_same(cell: Cell) -> bool:
    """Whether it loses nothing on its way, and steps with all others: a plan takes no other."""
    return registry.find(cell.strategy).numerics == "exact" and not quantised(cell)


@dataclass(frozen=True)
class Row:
    """A matrix, or several together, as the report shows it."""

    matrix: str
    quiet: bool
    pairs: int
    right: str
    choices: int
    median_cost: str
    largest_cost: str


def rows(orders: Sequence[Order]) -> list[Row]:
    """One per matrix, then of all whose times may be read, and of all: bad ones included."""
    found = [_row(each.matrix, each.quiet, [each]) for each in orders]
    found.append(_row("together, if nothing ran beside", True, [o for o in orders if o.quiet]))
    return [*found, _row("together", False, orders)]


def _row(name: str, quiet: bool, orders: Sequence[Order]) -> Row:
    pairs = sum(each.pairs for each in orders)
    right = sum(each.right for each in orders)
    costs = [cost for each in orders for cost, _, _ in each.costs]
    return Row(
        name,
        quiet,
        pairs,
        f"{right} ({100 * right / pairs:.1f} %)" if pairs else text.ABSENT,
        len(costs),
        f"{100 * median(costs):.0f} %" if costs else text.ABSENT,
        f"{100 * max(costs):.0f} %" if costs else text.ABSENT,
    )


def wrong_in_words(orders: Sequence[Order]) -> list[str]:
    """Why pairs of matrices whose times may be read are wrong: cells that are in most of them."""
    counts = Counter(
        (each.matrix, cell.record.cell.strategy)
        for each in orders
        if each.quiet
        for pair in each.wrong
        for cell in pair
    )
    return [
        f"{strategy} ({matrix}, {count})" for (matrix, strategy), count in counts.most_common(6)
    ]
