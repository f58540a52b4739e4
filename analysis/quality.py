"""Time to quality: held-out loss over seconds on each link, and the first strategy at a loss.

Losses by step are those of each strategy's best trial, in a search with as many trials for each.
Seconds per step are measured separately, as losses do not depend on the link.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import mean, median, stdev

from matplotlib.figure import Figure

from analysis import strategies, text
from analysis.figures.drawings import Drawing, canvas, line, put_legend, svg
from experiments.records.cell import Cell
from experiments.records.comparison import grouped, interval, pooled
from experiments.records.record import Record, read
from experiments.records.select import FILE
from simulation.planner.quality import Case, Quality
from simulation.quantities import format_link

#: The matrix of the search, and that of the times.
SEARCH, TIMES = "fair-search", "time-to-quality"
#: Setting that a search varies beside the learning rate; it does not change a step's time.
_TRIED = "outer_momentum"


@dataclass(frozen=True)
class Trial:
    """A trial of a search: a strategy, its hyperparameters, and each seed's held-out losses."""

    strategy: str
    #: The strategy with its settings, without those that the search varies.
    subject: str
    learning_rate: float
    momentum: float | None
    #: Each seed's held-out losses, by the number of steps before them.
    curves: tuple[dict[int, float], ...]

    @property
    def label(self) -> str:
        return strategies.label(self.strategy) + self.subject.removeprefix(self.strategy)

    @property
    def ends(self) -> list[float]:
        """The last loss of each seed; infinite where it is not finite."""
        ends = (curve[max(curve)] for curve in self.curves)
        return [end if math.isfinite(end) else math.inf for end in ends]

    def steps_to(self, loss: float) -> list[float] | None:
        """Steps to a loss, of each seed; ``None`` if one does not reach it."""
        crossings = [_crosses(curve, loss) for curve in self.curves]
        known = [steps for steps in crossings if steps is not None]
        return known if len(known) == len(crossings) else None


def _crosses(curve: dict[int, float], loss: float) -> float | None:
    """The step at which a curve first reaches a loss, interpolated between measurements."""
    points = sorted(curve.items())
    if points[0][1] <= loss:
        return float(points[0][0])
    for (before, high), (after, low) in pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


@dataclass(frozen=True)
class Course:
    """A strategy's best trial on one link."""

    trial: Trial
    bits_per_s: int | None
    #: Seconds per step: the median of rounds, and its interval.
    seconds: float
    least: float
    most: float
    #: Seconds that a step's bytes take on the link.
    link_seconds: float

    def seconds_to(self, loss: float) -> tuple[float, float, float] | None:
        """Seconds to a loss: the median seed's, and the least and most over seeds and rounds."""
        steps = self.trial.steps_to(loss)
        if steps is None:
            return None
        return median(steps) * self.seconds, min(steps) * self.least, max(steps) * self.most


def subject(cell: Cell) -> str:
    """A strategy with its settings, without those that a search varies."""
    field = type(cell.settings).model_fields.get(_TRIED)
    usual = {} if field is None else {_TRIED: field.default}
    settings = cell.settings.model_copy(update=usual)
    return cell.model_copy(update={"settings": settings}).subject


def best(records: Sequence[Record]) -> list[Trial]:
    """Each strategy's trial with the lowest last loss, in the mean over seeds.

    Raises ``ValueError`` where a trial has no losses, or strategies differ in trials or seeds.
    """
    ran = [record for record in records if record.state != "skipped"]
    trials = [_trial(group) for group in grouped(ran, lambda record: _choice(record.cell))]
    by_subject = grouped(trials, lambda trial: trial.subject)
    counts = {of[0].subject: (len(of), *{len(trial.curves) for trial in of}) for of in by_subject}
    if len(set(counts.values())) > 1 or any(len(of) != 2 for of in counts.values()):
        raise ValueError(f"trials, and seeds of each = {counts}: must be as many for all")
    return [min(of, key=lambda trial: mean(trial.ends)) for of in by_subject]


def _choice(cell: Cell) -> tuple[str, float, float | None]:
    return subject(cell), cell.learning_rate, getattr(cell.settings, _TRIED, None)


def _trial(records: Sequence[Record]) -> Trial:
    curves = []
    for record in records:
        losses = record.measurement and record.measurement.held_out_losses
        if not losses:
            raise ValueError(f"{record.cell_id}: has no held_out_losses ({record.state})")
        curves.append(losses)
    cell = records[0].cell
    return Trial(cell.strategy, *_choice(cell), tuple(curves))


def joined(search: Sequence[Record], times: Sequence[Record]) -> list[Course]:
    """Each strategy's best trial with its times on each link, the slowest link first.

    Raises ``ValueError`` where the search or the times lack a record.
    """
    trials, timed = best(search), [record for record in pooled(times) if record.state == "ok"]
    links = {record.cell.inter_bandwidth_bits_per_s: None for record in timed}
    by = {(subject(r.cell), r.cell.inter_bandwidth_bits_per_s): r for r in timed}
    courses = []
    for link in sorted(links, key=lambda bits: bits or math.inf):
        for trial in trials:
            record = by.get((trial.subject, link))
            if record is None or record.measurement is None:
                raise ValueError(f"{trial.subject}, {format_link(link)}: is not among the times")
            rounds = record.measurement.round_seconds
            taken = 8 * record.measurement.inter_node_bytes_per_step / (link or math.inf)
            courses.append(Course(trial, link, median(rounds), *interval(rounds), taken))
    return courses


def quality(courses: Sequence[Course], times: Sequence[Record]) -> Quality:
    """Cases for plans: the first strategy at the loss that the exact one has at half its steps."""
    parameters = next(record.measurement.parameters for record in times if record.measurement)
    return Quality(parameters=parameters, cases=tuple(cases(courses, targets(courses)[0])))


def write(results: Path) -> tuple[str, Path, Path]:
    """Write the figure, and the cases for plans, beside the times; return the tables, and where.

    Raises ``ValueError`` or ``OSError`` without records of both matrices.
    """
    search, times = (read(results / name / FILE) for name in (SEARCH, TIMES))
    courses = joined(search, times)
    figure, plans = (results / TIMES / f"quality.{end}" for end in ("svg", "json"))
    plans.write_text(quality(courses, times).model_dump_json(indent=1) + "\n", encoding="utf-8")
    figure.write_bytes(svg(Drawing("quality", "Time to quality", "", draw(courses))))
    return markdown(courses), figure, plans


def targets(courses: Sequence[Course]) -> list[float]:
    """Losses that all seeds of the exact strategy reach at half of its steps, and at the end.

    The exact strategy is the first of the search.
    """
    curves = courses[0].trial.curves
    steps = sorted(curves[0])
    ends = steps[(len(steps) - 1) // 2], steps[-1]
    return [math.ceil(100 * max(curve[at] for curve in curves)) / 100 for at in ends]


def markdown(courses: Sequence[Course]) -> str:
    """Tables of seconds to each target by link, and a sentence for each."""
    on_link = _on_link(courses)
    links = [format_link(of[0].bits_per_s) for of in on_link]
    parts = [text.table(("Strategy", "Learning rate", "β", "loss at the end"), _ends(on_link[0]))]
    for loss in targets(courses):
        rows = [
            (of[0].trial.label, *(_seconds(course, loss) for course in of))
            for of in zip(*on_link, strict=True)
        ]
        parts.append(text.table((f"Seconds to a loss of {loss:g}", *links), rows))
        clauses = (each.clause(f"{loss:g}") for each in cases(courses, loss))
        lines = (f"- On {link} {clause}." for link, clause in zip(links, clauses, strict=True))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _ends(courses: Sequence[Course]) -> Iterator[tuple[str, ...]]:
    for course in courses:
        trial, ends = course.trial, course.trial.ends
        momentum = text.ABSENT if trial.momentum is None else f"{trial.momentum:g}"
        spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
        yield trial.label, f"{trial.learning_rate:g}", momentum, f"{mean(ends):.3f}{spread}"


def _seconds(course: Course, loss: float) -> str:
    seconds = course.seconds_to(loss)
    if seconds is None:
        return text.ABSENT
    middle, least, most = (text.number(end) for end in seconds)
    return f"{middle} ({least}–{most})"


def cases(courses: Sequence[Course], loss: float) -> list[Case]:
    """The first strategy at the loss on each link, by the link's share of the computation.

    The exact strategy is the first of the search. Computation is a step on the fastest link,
    without the seconds of its bytes.
    """
    on_link, races = _on_link(courses), list[Case]()
    fastest = on_link[-1][0]
    computing = fastest.seconds - fastest.link_seconds
    for exact, *others in on_link:
        baseline = exact.seconds_to(loss)
        assert baseline is not None, "a loss that all its seeds come to"
        there = [(course, seconds) for course in others if (seconds := course.seconds_to(loss))]
        first, (middle, _, most) = min([(exact, baseline), *there], key=lambda each: each[1][0])
        race = Case(
            share=exact.link_seconds / computing,
            exact=exact.trial.label,
            first=first.trial.label,
            sooner=baseline[0] / middle,
            alike=first is not exact and most >= baseline[1],
            above=mean(first.trial.ends) / mean(exact.trial.ends) - 1,
        )
        races.append(race)
    return races


def _on_link(courses: Sequence[Course]) -> list[list[Course]]:
    return [list(of) for _, of in groupby(courses, key=lambda course: course.bits_per_s)]


def draw(courses: Sequence[Course]) -> Figure:
    """Held-out loss over seconds, a panel per link: the mean of the seeds, and all of them."""
    labels = {course.trial.subject: course.trial.label for course in courses}
    looks = strategies.styles(labels)
    on_link = _on_link(courses)
    with canvas(2.6 * len(on_link), 3.4, 1, len(on_link), sharey=True) as (figure, (grid,)):
        for ax, of in zip(grid, on_link, strict=True):
            ax.set(title=format_link(of[0].bits_per_s), xscale="log", xlabel="seconds")
            for course in of:
                look = looks[course.trial.subject]
                steps = sorted(course.trial.curves[0])
                losses = [[curve[step] for curve in course.trial.curves] for step in steps]
                at = [step * course.seconds for step in steps]
                drawn = {"color": look.colour, "linestyle": look.dashes, "linewidth": 1.4}
                ax.plot(at, list(map(mean, losses)), **drawn)
                ends = list(map(min, losses)), list(map(max, losses))
                ax.fill_between(at, *ends, color=look.colour, alpha=0.15, linewidth=0)
        grid[0].set_ylabel("held-out loss")
        put_legend(figure, [line(replace(looks[name], label=labels[name])) for name in looks])
    return figure
