"""What the page of the claims opens with: what the records say, in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis import strategies, text
from analysis.compare.baseline import Headline, compare, headlines
from analysis.load.runs import AnyRun, Run
from analysis.paper.chapter import Chapter
from simulation.quantities import format_link

#: The committed run of all link speeds, from which the gains of our own clusters are quoted.
_REFERENCE = "reference"


@dataclass(frozen=True)
class Summary:
    """What the opening's sentences say."""

    #: Records by how they were obtained.
    evidence: tuple[tuple[str, int], ...]
    matrices: int
    gains: tuple[str, ...]
    #: The FCDP paper's own results by verdict.
    verdicts: tuple[tuple[str, int], ...]


def in_short(of: Sequence[AnyRun], chapter: Chapter) -> Summary:
    """The summary of committed runs and of the chapter on the paper."""
    ran: Counter[str] = Counter(
        record.evidence
        for run in of
        if isinstance(run, Run)
        for record in run.records
        if record.state != "skipped"
    )
    return Summary(
        tuple((name, ran[name]) for name in text.EVIDENCE),
        sum(isinstance(run, Run) for run in of),
        tuple(_gain(item) for run in of for item in _headlines(run)),
        tuple(Counter(row[4] for row in chapter.opening).items()),
    )


def _headlines(run: AnyRun) -> list[Headline]:
    if not isinstance(run, Run) or run.matrix != _REFERENCE:
        return []
    return headlines(compare(run.records))


def _gain(item: Headline) -> str:
    """The largest speed-up of one way of tuning, with its bytes and the next best."""
    other = f"{text.times(item.speed_up_over_fastest_other)} that of " + strategies.label(
        item.fastest_other
    )
    beside = "" if item.fastest_other == item.baseline else f" ({other}, the fastest other)"
    return (
        f"{text.TUNINGS[item.tuning]}, {format_link(item.bandwidth)} between nodes, "
        f"{item.evidence}: {strategies.label(item.subject)} reaches up to "
        f"{text.times(item.speed_up)} the throughput of {strategies.label(item.baseline)}{beside}, "
        f"with {text.percent(item.bytes_of_baseline)} of its bytes between nodes."
    )
