"""Comparisons of cells' speeds: which cells are compared, and how sure their ratio is.

A speed is the median of rounds, and its spread and interval are of rounds: one step of a round
waits for what the others do not. Where all steps are alike, each is a round.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, lgamma, log
from statistics import quantiles
from typing import TypeVar

from experiments.records import settings
from experiments.records.cell import Cell
from experiments.records.record import Record

#: A cell's interval misses the true median in at most one of so many cases, whatever the
#: distribution of rounds. The interval of a ratio, made of both cells' ends, misses it as rarely
#: where most of the noise is one cell's, and more rarely elsewhere.
ONE_IN = 20
#: Fewest rounds that decide: fewer are all on one side of the median more often than that.
FEWEST = 6

#: Subjects that others are compared with, the first of those that ran, and their names in columns:
#: ZeRO-3 as it ships, then this library without its cache, then with its defaults.
REFERENCES: Mapping[str, str] = {
    "deepspeed-zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "fcdp none": "no cache",
    "fcdp": "FCDP",
}

_T = TypeVar("_T")
_Range = tuple[float, float]


@cache
def left_out(rounds: int) -> int:
    """The number of rounds at each end that lie outside a cell's interval; 0 for few rounds.

    By the sign test: as many rounds are below their distribution's median as coins show heads.
    """
    scale = lgamma(rounds + 1) - rounds * log(2) + log(2 * ONE_IN)
    tail = 0.0
    for heads in range(rounds + 1):
        tail += exp(scale - lgamma(heads + 1) - lgamma(rounds - heads + 1))
        if tail > 1:
            return max(0, heads - 1)
    raise AssertionError("the tail is all of it in the end")


def interval(seconds: Sequence[float], over: Sequence[float] | None = None) -> _Range:
    """The two rounds between which the median lies, as surely as ``ONE_IN`` says; of few, all.

    With ``over``, the quotient of both medians: each end over the other end of that interval.
    """
    ordered, out = sorted(seconds), left_out(len(seconds))
    if over is None:
        return ordered[out], ordered[~out]
    least, most = interval(over)
    return ordered[out] / most, ordered[~out] / least


def spread(record: Record) -> _Range | None:
    """The first and the third quartile of the rounds' seconds; ``None`` without a measurement."""
    if record.measurement is None:
        return None
    seconds = record.measurement.round_seconds
    low, _, high = seconds * 3 if len(seconds) == 1 else quantiles(seconds, method="inclusive")
    return low, high


@dataclass(frozen=True)
class Comparison:
    """A cell and its baseline; ``None`` for a cell without a baseline."""

    of: Record
    over: Record | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast, by tokens per second; ``None`` where either has no speed."""
        speed, baseline = self.of.tokens_per_s, self.over and self.over.tokens_per_s
        return speed / baseline if speed and baseline else None

    @property
    def interval(self) -> _Range | None:
        """The interval of the ratio; ``None`` where there is none."""
        if self.ratio is None:
            return None
        own, baseline = self._rounds
        assert self.over is not None
        tokens = self.of.cell.tokens_per_step / self.over.cell.tokens_per_step
        low, high = interval(baseline, own)
        return tokens * low, tokens * high

    @property
    def timed(self) -> bool:
        """Whether both were timed by clocks: simulated times have no noise."""
        return "simulated" not in (self.of.evidence, self.over and self.over.evidence)

    @property
    def rounds(self) -> int:
        """The number of rounds of the cell that has fewer."""
        return min(map(len, self._rounds), default=0)

    @property
    def decides(self) -> bool:
        """Whether there are rounds enough for an interval, or no noise."""
        return self.rounds >= FEWEST or not self.timed

    @property
    def differs(self) -> bool:
        """Whether one cell is faster: 1 is outside of the interval."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    @property
    def _rounds(self) -> list[list[float]]:
        both = (self.of.measurement, self.over and self.over.measurement)
        return [measured.round_seconds for measured in both if measured]


def few(comparisons: Iterable[Comparison]) -> str | None:
    """A warning about comparisons of few rounds; ``None`` where there is none."""
    count = sum(pair.ratio is not None and not pair.decides for pair in comparisons)
    if not count:
        return None
    return (
        f"{count} speed-up{'s are' if count > 1 else ' is'} of fewer than {FEWEST} rounds: the "
        "interval is all that these span, and decides no claim"
    )


def paired(
    ours: Iterable[_T], theirs: Iterable[_T], alike: Callable[[_T], Hashable]
) -> Iterator[tuple[_T, _T]]:
    """Pairs of each of ours and the last of theirs with the same value of ``alike``; no others."""
    by_key = {alike(item): item for item in theirs}
    return ((item, by_key[key]) for item in ours if (key := alike(item)) in by_key)


def grouped(items: Iterable[_T], alike: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Groups of items with the same value of ``alike``, in the order of the first of each."""
    by_key: dict[Hashable, list[_T]] = {}
    for item in items:
        by_key.setdefault(alike(item), []).append(item)
    return list(by_key.values())


def groups(records: Iterable[Record]) -> list[list[Record]]:
    """Groups of records that may be compared, in the order of the first of each."""
    of_matrices = grouped(records, lambda record: record.cell.matrix)
    return [group for matrix in of_matrices for group in grouped(matrix, _condition(matrix))]


def _condition(matrix: Sequence[Record]) -> Callable[[Record], Hashable]:
    """Return a function from a record to the values that comparable records of this matrix share.

    Without the micro-batch where each strategy has its own: in simulations, the largest that fits.
    """
    names = settings.names(Cell, "condition")
    ran = [record for record in matrix if record.state != "skipped"]
    if all(record.evidence == "simulated" for record in ran):
        others = [name for name in names if name != "micro_batch"]
        apart = {(of.cell.subject, *settings.values(of.cell, others).values()) for of in ran}
        if len(apart) == len(ran) and len({of.cell.micro_batch for of in ran}) > 1:
            names = others
    return lambda record: (record.evidence, *settings.values(record.cell, names).values())


def reference(records: Iterable[Record], subject: str | None = None) -> Record | None:
    """The cell that others are compared with: that of ``subject``, else of ``REFERENCES``.

    ``None`` where none of these ran to its end.
    """
    ran: dict[str | None, Record] = {}
    for record in records:
        if record.state == "ok":
            ran.setdefault(record.cell.subject, record)
    return next((ran[name] for name in (subject, *REFERENCES) if name in ran), None)


def once(cell: Cell) -> Cell:
    """The cell without the index of its repetition."""
    return cell.model_copy(update={"repeat": 0})


def pooled(records: Iterable[Record]) -> list[Record]:
    """One record for all repetitions of a cell, in the order of the first of each.

    It has the whole rounds of all that ran to their end, in turn, the mean of their phases, and the
    machine whose host took most of the time; all else is that of the first of them.
    """
    alike = grouped(records, lambda record: (once(record.cell).id, record.evidence))
    return [_as_one(group) for group in alike]


def _as_one(group: list[Record]) -> Record:
    if len(group) == 1:
        return group[0]
    ran = [record for record in group if record.measurement is not None] or group[:1]
    first, cell = ran[0], once(ran[0].cell)
    steps = [seconds for r in ran if r.measurement for seconds in r.measurement.in_whole_rounds]
    phases = [by_phase for r in ran if r.measurement and (by_phase := r.measurement.phase_seconds)]
    names = phases[0] if phases else {}
    mean = {name: sum(each[name] for each in phases) / len(phases) for name in names}
    measured = first.measurement and first.measurement.model_copy(
        update={"step_seconds": steps, "phase_seconds": mean or None}
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
