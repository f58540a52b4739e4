"""Claims beside the committed records; ``decide`` is the one place that decides a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Literal, get_args

from analysis import strategies, text
from analysis.claims.computations import SCALES, Measure, Ratio, Sample, Value, taken
from analysis.claims.papers import Check, Claim, Claims
from analysis.load.rows import Row
from experiments.records.abilities import Evidence
from experiments.records.comparison import FEWEST

Verdict = Literal[
    "holds",
    "holds in part",
    "does not hold",
    "cannot be told here",
    "shown by a test",
    "not run",
]
#: The meaning of each verdict, for readers.
VERDICTS: dict[Verdict, str] = {
    "holds": "all comparisons that count are as near to the paper as asked",
    "holds in part": "some comparisons that count are as near as asked, and others are not",
    "does not hold": "no comparison that counts is as near as asked; the reason, where one was "
    "found, stands beside it",
    "cannot be told here": "no comparison decides: the answer depends on what the paper leaves "
    "open, ours ran in another setting than the paper's, ours was fitted to the paper's number, or "
    "too few or too noisy steps were timed",
    "shown by a test": "no record could show it, and a test of this repository does",
    "not run": "no record bears on it; what a run takes stands beside it",
}


@dataclass(frozen=True)
class Ranged:
    """A simulated number's range over the settings that its paper leaves open."""

    low: float
    high: float
    #: Share of the settings with a number at which it agrees with the paper's.
    share: float
    #: Those settings, in words; empty where they are all, or none.
    part: str
    #: The number at the best point, where the most of the paper's numbers agree with ours.
    best: float
    #: Whether the simulated system was read from it, so that agreement says nothing.
    fitted: bool = False

    @property
    def agrees(self) -> bool | None:
        """Whether the number agrees with the paper's at all settings, or at none.

        ``None`` where the settings decide it, or where agreement says nothing.
        """
        if self.fitted or 0 < self.share < 1:
            return None
        return self.share == 1

    def span(self, unit: Measure | None) -> str:
        """The range from the least to the most, in words."""
        ends = dict.fromkeys(rounded(end, unit) for end in (self.low, self.high))
        return " to ".join(ends)

    @property
    def words(self) -> str | None:
        """A sentence on the settings at which both agree; ``None`` if no setting decides it."""
        if not self.part:
            return None
        share = text.number(100 * self.share)
        return f"At {share} % of the settings that fit, the paper's number: with {self.part}."


@dataclass(frozen=True)
class Finding:
    """The answer of the records to one check of a claim."""

    check: Check
    #: Our number, in the claim's unit; ``None`` where nothing was run.
    ours: float | None
    #: Whether our number is within the tolerance; ``None`` where nothing was run, or where noise
    #: does not let it be told.
    agrees: bool | None
    #: The interval of our number, in the claim's unit, where it was timed.
    interval: tuple[float, float] | None
    #: The fewest rounds of a timed cell.
    rounds: int | None
    #: The cells that ours is taken from; their evidence is of one kind.
    samples: tuple[Sample, ...]
    #: Compared cells that have no figures.
    lacking: tuple[Row, ...]
    #: Notes on the comparison, and why our number is not as near as asked, or was not run.
    notes: tuple[str, ...]

    @property
    def evidence(self) -> Evidence | None:
        """The evidence of the cells that ours is taken from."""
        return self.samples[0].row.evidence if self.samples else None


@dataclass(frozen=True)
class Judgement:
    """A claim or a hypothesis, and all that bears on it."""

    claim: Claim
    #: One per check, in the order of the checks.
    findings: tuple[Finding, ...]
    #: The range of the simulated number, where the paper leaves settings open.
    ranged: Ranged | None
    #: ``None`` for a hypothesis.
    verdict: Verdict | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the claim as a whole."""
        shown = f"Shown by {', '.join(self.claim.shown_by)}." if self.claim.shown_by else None
        ranged = self.ranged.words if self.ranged else None
        return tuple(filter(None, (ranged, self.claim.untested, shown)))


def decide(claim: Claim, findings: Sequence[Finding], ranged: Ranged | None = None) -> Verdict:
    """Decide the verdict on a claim, from the findings on its checks.

    Results count, in the claim's own setting; context and fits do not. With ``ranged`` a simulated
    result is told by its range over what the paper leaves open, and not by its one setting.
    """
    results = [finding for finding in findings if finding.check.role == "result"]
    agree = {
        ranged.agrees if ranged and finding.evidence == "simulated" else finding.agrees
        for finding in results
    }
    if agree >= {True, False}:
        return "holds in part"
    if True in agree:
        return "holds"
    if False in agree:
        return "does not hold"
    if claim.shown_by:
        return "shown by a test"
    ran = any(finding.ours is not None for finding in findings)
    return "cannot be told here" if ran else "not run"


def judge(
    claims: Claims, rows: Mapping[str, Sequence[Row]], ranges: Mapping[str, Ranged] | None = None
) -> list[Judgement]:
    """Judge each claim and each hypothesis, in the file's order.

    ``rows`` are the cells of each matrix that has been run, by the matrix's name; ``ranges`` are
    simulated numbers over the settings that a paper leaves open, by the claim's id.
    """
    judgements = []
    hypotheses = {hypothesis.id for hypothesis in claims.hypotheses}
    for claim in claims.every:
        findings = tuple(_find(claims, claim, c, rows.get(c.matrix)) for c in claim.checks)
        ranged = (ranges or {}).get(claim.id)
        verdict = None if claim.id in hypotheses else decide(claim, findings, ranged)
        judgements.append(Judgement(claim, findings, ranged, verdict))
    return judgements


def _find(claims: Claims, claim: Claim, check: Check, rows: Sequence[Row] | None) -> Finding:
    """Compare the claim with the cells of the check's matrix, if the matrix has been run."""
    samples = check.compute.samples(rows or ())
    if not samples:
        reason = f"No cell of {check.matrix} has a result with which to compare."
        if rows is None:
            reason = "There are no records of its matrix."
        return Finding(check, None, None, None, None, (), (), (reason,))
    # Where there are several kinds of evidence, the one nearest to real nodes counts.
    evidence = min({sample.row.evidence for sample in samples}, key=get_args(Evidence).index)
    samples = [sample for sample in samples if sample.row.evidence == evidence]
    assert claim.unit is not None, "checked when the claim was read"
    ours = taken(samples, check.compute.take) * SCALES[claim.unit]
    near = check.tolerance.admits(ours, claim.number)
    ratio = check.compute if isinstance(check.compute, Ratio) else None
    timed = ratio.timing(samples) if ratio else None
    lacking = ratio.lacking(rows or ()) if ratio else ()
    interval, unsure = None, None
    if timed is not None:
        low, high = (end * SCALES[claim.unit] for end in timed.interval)
        interval = low, high
        if timed.rounds < FEWEST:
            unsure = (
                f"Timed over fewer than {FEWEST} rounds in a cell: it is not told from noise, and "
                "decides nothing."
            )
        elif not check.tolerance.decides(interval, claim.number):
            unsure = "Its interval is in part near enough, and in part not."
    # The matrix's note on noise goes with comparisons of times.
    times = isinstance(check.compute, Ratio | Value) and check.compute.quantity == "tokens_per_s"
    noise = claims.matrices[check.matrix].noise if times else None
    because = None if near else check.because
    if not near and unsure is None and check.role == "result" and because is None:
        because = "No reason has been found yet."
    notes = tuple(filter(None, (check.note, noise, unsure, because)))
    return Finding(
        check,
        ours,
        agrees=None if unsure else near,
        interval=interval,
        rounds=timed.rounds if timed else None,
        samples=tuple(samples),
        lacking=tuple(lacking),
        notes=notes,
    )


def cells(finding: Finding, unit: Measure | None) -> str:
    """The cells that our number is taken from, those without figures, and the interval."""
    samples = finding.samples
    if not samples:
        return ""
    models = ", ".join(sorted({str(sample.row.settings["model"]) for sample in samples}))
    words = f"{finding.check.compute.take} of {len(samples)} cells ({models})"
    if len(samples) == 1:
        words = f"{models}, {samples[0].row.settings['link']}"
    lacking = dict.fromkeys(
        f"{strategies.label(str(row.settings['strategy']))} {row.state} ({row.settings['model']})"
        for row in finding.lacking
    )
    if lacking:
        words += f"; without figures: {', '.join(lacking)}"
    if finding.rounds is not None:
        plural = "s" if finding.rounds > 1 else ""
        words += f"; {finding.rounds} round{plural}: {between(finding.interval, unit)}"
    return words


def quoted(value: float | None, unit: Measure | None) -> str:
    """A paper's number as it stands in the file, with its unit; a dash where there is none."""
    return text.ABSENT if value is None else _with_unit(f"{value:,.12g}", unit)


def labelled(claim: Claim) -> str:
    """A paper's number, and how well it is known."""
    return f"{quoted(claim.number, claim.unit)} [{claim.label}]"


def rounded(value: float | None, unit: Measure | None) -> str:
    """One of our numbers, to as many digits as set it apart from the paper's."""
    # Ours is infinite where its cell has no figures.
    if value is None or isinf(value):
        return text.ABSENT
    # A share near 100 % is read by the part that is missing.
    return _with_unit(text.number(value, 4 if unit == "%" and 99 <= value < 100 else 3), unit)


def between(interval: tuple[float, float] | None, unit: Measure | None) -> str:
    """The ends of an interval, if there is one."""
    if interval is None:
        return ""
    low, high = (rounded(end, unit) for end in interval)
    return f"{low} to {high}"


def asked(check: Check, unit: Measure | None) -> str:
    """The tolerance in words."""
    tolerance = check.tolerance
    if tolerance.relative is not None:
        return f"within {_with_unit(f'{tolerance.relative * 100:g}', '%')}"
    if tolerance.at_least is not None:
        return f"at least {quoted(tolerance.at_least, unit)}"
    return f"at most {quoted(tolerance.at_most, unit)}"


def _with_unit(number: str, unit: Measure | None) -> str:
    return f"{number}{unit}" if unit == "×" else f"{number} {unit}"
