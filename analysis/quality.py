"""Time to quality: held-out loss over seconds on each link, and which strategy is the first there.

Losses by step are those of each strategy's best trial in a search that gave all as many; seconds
per step are measured apart, as what is trained does not depend on the link.
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
#: Setting that a search tries beside the learning rate: steps take as long whatever it is.
_TRIED = "outer_momentum"


@dataclass(frozen=True)
class Trial:
    """A strategy with one choice of what is searched, and what it came to with each seed."""

    strategy: str
    #: The strategy with its choices, but for what is searched.
    subject: str
    learning_rate: float
    momentum: float | None
    #: Held-out losses by the steps before, of each seed.
    curves: tuple[dict[int, float], ...]

    @property
    def label(self) -> str:
        return strategies.label(self.strategy) + self.subject.removeprefix(self.strategy)

    @property
    def ends(self) -> list[float]:
        """The last loss of each seed; one that is no number is worse than all."""
        ends = (curve[max(curve)] for curve in self.curves)
        return [end if math.isfinite(end) else math.inf for end in ends]

    def steps_to(self, loss: float) -> list[float] | None:
        """Steps to a loss, of each seed; ``None`` if one does not come to it."""
        found = [_crosses(curve, loss) for curve in self.curves]
        known = [steps for steps in found if steps is not None]
        return known if len(known) == len(found) else None


def _crosses(curve: dict[int, float], loss: float) -> float | None:
    """The step at which a curve first comes to a loss, on the line between two measurements."""
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
        """Seconds to a loss: of the median seed, and of the first and last with their rounds."""
        steps = self.trial.steps_to(loss)
        if steps is None:
            return None
        return median(steps) * self.seconds, min(steps) * self.least, max(steps) * self.most


def subject(cell: Cell) -> str:
    """The subject of comparison: a strategy and its choices, but for what a search tries."""
    field = type(cell.settings).model_fields.get(_TRIED)
    usual = {} if field is None else {_TRIED: field.default}
    settings = cell.settings.model_copy(update=usual)
    return cell.model_copy(update={"settings": settings}).subject


def best(records: Sequence[Record]) -> list[Trial]:
    """The trial of each strategy whose last losses are the lowest, in the mean of its seeds.

    Raises ``ValueError`` where a trial has no losses, or strategies did not have as many alike.
    """
    ran = [record for record in records if record.state != "skipped"]
    trials = [_trial(group) for group in grouped(ran, lambda record: _choice(record.cell))]
    by_subject = grouped(trials, lambda trial: trial.subject)
    given = {of[0].subject: (len(of), *{len(trial.curves) for trial in of}) for of in by_subject}
    if len(set(given.values())) > 1 or any(len(of) != 2 for of in given.values()):
        raise ValueError(f"trials, and seeds of each = {given}: must be as many for all")
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


def courses(search: Sequence[Record], times: Sequence[Record]) -> list[Course]:
    """Each strategy on each link, the slowest link first.

    Raises ``ValueError`` for what the search or the times do not hold.
    """
    found, timed = best(search), [record for record in pooled(times) if record.state == "ok"]
    links = {record.cell.inter_bandwidth_bits_per_s: None for record in timed}
    by = {(subject(each.cell), each.cell.inter_bandwidth_bits_per_s): each for each in timed}
    courses = []
    for link in sorted(links, key=lambda bits: bits or math.inf):
        for trial in found:
            record = by.get((trial.subject, link))
            if record is None or record.measurement is None:
                raise ValueError(f"{trial.subject}, {format_link(link)}: is not among the times")
            rounds = record.measurement.round_seconds
            taken = 8 * record.measurement.inter_node_bytes_per_step / (link or math.inf)
            courses.append(Course(trial, link, median(rounds), *interval(rounds), taken))
    return courses


def quality(found: Sequence[Course], times: Sequence[Record]) -> Quality:
    """Cases for plans to say: who comes to the loss after half of the exact strategy's steps."""
    parameters = next(each.measurement.parameters for each in times if each.measurement)
    return Quality(parameters=parameters, cases=tuple(cases(found, targets(found)[0])))


def write(results: Path) -> tuple[str, Path, Path]:
    """Write the figure and what plans say beside the times; return the tables, and where.

    Raises ``ValueError`` or ``OSError`` without records of both matrices.
    """
    search, times = (read(results / name / FILE) for name in (SEARCH, TIMES))
    found = courses(search, times)
    figure, said = (results / TIMES / f"quality.{end}" for end in ("svg", "json"))
    said.write_text(quality(found, times).model_dump_json(indent=1) + "\n", encoding="utf-8")
    figure.write_bytes(svg(Drawing("quality", "Time to quality", "", draw(found))))
    return markdown(found), figure, said


def targets(found: Sequence[Course]) -> list[float]:
    """Losses that all seeds of the exact strategy have after half of its steps, and at the end.

    The exact one is the first in order, as the search has it.
    """
    curves = found[0].trial.curves
    steps = sorted(curves[0])
    ends = steps[(len(steps) - 1) // 2], steps[-1]
    return [math.ceil(100 * max(curve[at] for curve in curves)) / 100 for at in ends]


def markdown(found: Sequence[Course]) -> str:
    """Tables of seconds to each target by link, and a sentence for each."""
    on_link = _on_link(found)
    links = [format_link(of[0].bits_per_s) for of in on_link]
    parts = [text.table(("Strategy", "Learning rate", "β", "loss at the end"), _ends(on_link[0]))]
    for loss in targets(found):
        rows = [
            (of[0].trial.label, *(_seconds(course, loss) for course in of))
            for of in zip(*on_link, strict=True)
        ]
        parts.append(text.table((f"Seconds to a loss of {loss:g}", *links), rows))
        said = zip(links, cases(found, loss), strict=True)
        parts.append("\n".join(f"- On {link} {case.clause(f'{loss:g}')}." for link, case in said))
    return "\n\n".join(parts)


def _ends(found: Sequence[Course]) -> Iterator[tuple[str, ...]]:
    for course in found:
        trial, ends = course.trial, course.trial.ends
        momentum = text.ABSENT if trial.momentum is None else f"{trial.momentum:g}"
        spread = f" ± {stdev(ends):.3f}" if len(ends) > 1 else ""
        yield trial.label, f"{trial.learning_rate:g}", momentum, f"{mean(ends):.3f}{spread}"


def _seconds(course: Course, loss: float) -> str:
    found = course.seconds_to(loss)
    if found is None:
        return text.ABSENT
    middle, least, most = (text.number(seconds) for seconds in found)
    return f"{middle} ({least}–{most})"


def cases(found: Sequence[Course], loss: float) -> list[Case]:
    """Who comes first to the loss on each link; computation is all that a step takes beside bytes.

    The exact strategy is the first in order; computation's seconds are those on the fastest link.
    """
    on_link, races = _on_link(found), list[Case]()
    fastest = on_link[-1][0]
    computing = fastest.seconds - fastest.link_seconds
    for exact, *others in on_link:
        own = exact.seconds_to(loss)
        assert own is not None, "a loss that all its seeds come to"
        there = [(course, seconds) for course in others if (seconds := course.seconds_to(loss))]
        first, (middle, _, most) = min([(exact, own), *there], key=lambda each: each[1][0])
        race = Case(
            share=exact.link_seconds / computing,
            exact=exact.trial.label,
            first=first.trial.label,
            sooner=own[0] / middle,
            alike=first is not exact and most >= own[1],
            above=mean(first.trial.ends) / mean(exact.trial.ends) - 1,
        )
        races.append(race)
    return races


def _on_link(found: Sequence[Course]) -> list[list[Course]]:
    return [list(of) for _, of in groupby(found, key=lambda course: course.bits_per_s)]


def draw(found: Sequence[Course]) -> Figure:
    """Held-out loss over seconds, a panel per link: the mean of the seeds, and all of them."""
    labels = {course.trial.subject: course.trial.label for course in found}
    looks = strategies.styles(labels)
    on_link = _on_link(found)
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
