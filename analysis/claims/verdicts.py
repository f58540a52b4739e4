"""Verdicts: each claim beside the committed records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from typing import Literal

from analysis import strategies, text
from analysis.claims.computations import (
    SCALES,
    Cause,
    Ratio,
    Sample,
    Unit,
    Value,
    changed,
    setting_of,
    taken,
)
from analysis.claims.papers import Check, Claim, Claims, Label, Role
from analysis.load.rows import Row
from experiments.records.abilities import Evidence
from experiments.records.comparison import FEWEST, grouped
from experiments.records.settings import Described

Verdict = Literal[
    "reproduced",
    "as stated",
    "not reproduced",
    "not run",
    "agrees",
    "differs",
    "as set up",
    "not as set up",
    "consistent",
    "inconsistent",
    "fitted",
    "undecided",
    "over the whole range",
    "in part of the range",
    "outside the range",
    "shown by a test",
    "read in code",
]
#: Verdicts by a comparison's role: within the tolerance, and outside of it.
VERDICTS: dict[Role, tuple[Verdict, Verdict]] = {
    "result": ("reproduced", "not reproduced"),
    "context": ("agrees", "differs"),
    "set-up": ("as set up", "not as set up"),
    "consistency": ("consistent", "inconsistent"),
    "fit": ("fitted", "fitted"),
}
#: Verdict on a claim by its results alone: they may disagree, and without any it is not judged.
Summary = Literal[
    "reproduced",
    "as stated",
    "reproduced in part",
    "not reproduced",
    "over the whole range",
    "in part of the range",
    "outside the range",
    "undecided",
    "shown by a test",
    "not run",
    "not judged",
]
#: Verdicts that are the claim's own if all of its results have the same one.
_ALONE: tuple[Summary, ...] = (
    "as stated",
    *("over the whole range", "in part of the range", "outside the range"),
    "shown by a test",
)
#: Numbers that no paper gives: they are hypotheses, and what agrees with them reproduces nothing.
HYPOTHESES: tuple[Label, ...] = ("derived", "recalled")


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
    def verdict(self) -> Verdict:
        """Whether it agrees with the paper's number at all settings, at some, or at none."""
        if self.fitted:
            return "fitted"
        if self.share == 1:
            return "over the whole range"
        return "in part of the range" if self.share else "outside the range"

    def span(self, unit: Unit | None) -> str:
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
    """The verdict on one check of a claim; without a check, the reason why there is none."""

    claim: Claim
    check: Check | None
    verdict: Verdict
    #: Our number, in the claim's unit; ``None`` where nothing was run.
    ours: float | None
    #: Its interval, in the claim's unit, where it was timed.
    interval: tuple[float, float] | None = field(default=None, kw_only=True)
    #: The evidence of the cells that ours is taken from; never more than one kind.
    evidence: Evidence | None
    #: The cells that ours is taken from, in words.
    cells: str
    #: Notes on the comparison, and why the claim was not reproduced, or not run.
    reasons: tuple[str, ...]

    @property
    def decides(self) -> bool:
        """Whether the claim's verdict rests on it."""
        if self.check is None:
            return self.verdict != "read in code"
        return _role(self.claim, self.check) == "result"


def _role(claim: Claim, check: Check) -> Role:
    """The comparison's role; that with a hypothesis is consistency at most."""
    return "consistency" if claim.label in HYPOTHESES and check.role == "result" else check.role


def judge(
    claims: Claims, rows: Mapping[str, Sequence[Row]], ranges: Mapping[str, Ranged] | None = None
) -> list[Finding]:
    """One finding per check, per claim without one, and per claim with tests, in the file's order.

    ``rows`` are the cells of each matrix that has been run. ``ranges`` are simulated numbers over
    the settings that a paper leaves open; a claim that has one is judged by it.
    """
    findings = []
    for claim in claims.claims:
        if not claim.checks or claim.shown_by:
            reason = claim.untested or claims.papers[claim.paper].untested
            assert reason is not None, "checked when the file was read"
            findings.append(_without_records(claim, reason))
        ranged = (ranges or {}).get(claim.id)
        for check in claim.checks:
            finding = _check(claims, claim, check, rows)
            if ranged and check.role == "result" and finding.evidence == "simulated":
                reasons = (*finding.reasons, *filter(None, [ranged.words]))
                role: Role = "fit" if ranged.fitted else check.role
                finding = replace(
                    finding,
                    check=check.model_copy(update={"role": role}),
                    verdict=ranged.verdict,
                    reasons=reasons,
                )
            findings.append(finding)
    return findings


def _without_records(claim: Claim, reason: str) -> Finding:
    """The finding on a claim without records: shown by a test, read in code, or not run."""
    verdict: Verdict = "not run"
    if claim.shown_by:
        verdict = "shown by a test"
        reason = f"{reason} Shown by {', '.join(claim.shown_by)}."
    elif claim.label == "code":
        verdict = "read in code"
    return Finding(claim, None, verdict, None, None, "", (reason,))


def summarise(findings: Sequence[Finding]) -> dict[str, Summary]:
    """Each claim's verdict over its results, by id; checks that were not run do not count."""
    by_claim = grouped(findings, lambda finding: finding.claim.id)
    return {of[0].claim.id: _summary([f.verdict for f in of if f.decides]) for of in by_claim}


def _summary(verdicts: Sequence[Verdict]) -> Summary:
    if not verdicts:
        return "not judged"
    ran = {*verdicts} - {"not run"}
    if not ran:
        return "not run"
    decided = ran - {"undecided"}
    if not decided:
        return "undecided"
    for alone in _ALONE:
        if decided == {alone}:
            return alone
    if len(decided) > 1:
        return "reproduced in part"
    return "reproduced" if "reproduced" in decided else "not reproduced"


def _check(
    claims: Claims, claim: Claim, check: Check, by_matrix: Mapping[str, Sequence[Row]]
) -> Finding:
    """One check against the cells of its matrix, if there are any."""
    rows, use = by_matrix.get(check.matrix), claims.matrices[check.matrix]
    samples = [] if rows is None else check.compute.samples(rows)
    if rows is None or not samples:
        reason = f"No cell of {check.matrix} has a result with which to compare."
        if rows is None:
            reason = "There are no records of its matrix."
        return Finding(claim, check, "not run", None, None, "", (reason,))
    # Where there are several kinds of evidence, the one nearest to real nodes counts.
    evidence = min({sample.row.evidence for sample in samples}, key=list(text.EVIDENCE).index)
    samples = [sample for sample in samples if sample.row.evidence == evidence]
    assert claim.unit is not None, "checked when the claim was read"
    ours = taken(samples, check.compute.take) * SCALES[claim.unit]
    near = check.tolerance.admits(ours, claim.number)
    role = _role(claim, check)
    verdict = VERDICTS[role][0 if near else 1]
    if verdict == "reproduced" and claim.number is None:  # its paper says so in words
        verdict = "as stated"
    timed = check.compute.timing(samples) if isinstance(check.compute, Ratio) else None
    interval, unsure, rounds = None, None, ""
    if timed is not None:
        low, high = (end * SCALES[claim.unit] for end in timed.interval)
        interval = low, high
        plural = "s" if timed.rounds > 1 else ""
        rounds = f"; {timed.rounds} round{plural}: {between(interval, claim.unit)}"
        if not timed.enough:
            unsure = (
                f"Timed over fewer than {FEWEST} rounds in a cell: it is not told from noise, and "
                "decides nothing."
            )
        elif not check.tolerance.decides(interval, claim.number):
            unsure = "Its interval is in part near enough, and in part not."
    if unsure is not None and role in ("result", "context"):
        verdict = "undecided"
    # The matrix's note on noise goes with comparisons of times.
    times = isinstance(check.compute, Ratio | Value) and check.compute.quantity == "tokens_per_s"
    reasons = [check.note, use.noise if times else None, unsure]
    if not near:
        why = [check.because, *(_computed(c, claim, check, by_matrix) for c in check.causes)]
        if verdict == "not reproduced" and not any(why):
            why = ["No reason has been found yet."]
        reasons += why
    cells = _cells(samples, check.compute.take) + _lacking(check, rows) + rounds
    present = tuple(filter(None, reasons))
    return Finding(claim, check, verdict, ours, evidence, cells, present, interval=interval)


def _lacking(check: Check, rows: Sequence[Row]) -> str:
    """The compared cells that have no figures, and how they ended."""
    if not isinstance(check.compute, Ratio):
        return ""
    lacking = [
        f"{strategies.label(str(row.settings['strategy']))} {row.state} ({row.settings['model']})"
        for row in check.compute.lacking(rows)
    ]
    return f"; without figures: {', '.join(dict.fromkeys(lacking))}" if lacking else ""


def _computed(
    cause: Cause, claim: Claim, check: Check, by_matrix: Mapping[str, Sequence[Row]]
) -> str | None:
    """The claim with one setting changed, in words; ``None`` without such cells."""
    change = changed(cause, check.compute, by_matrix[check.matrix], by_matrix.get(cause.matrix, ()))
    if change is None:
        return None
    assert claim.unit is not None, "checked when the claim was read"
    item, scale, take = setting_of(cause), SCALES[claim.unit], check.compute.take
    was, now = (taken(samples, take) * scale for samples in (change.before, change.after))
    before = ", ".join(_word(item, value) for value in change.was)
    reaches = "" if check.tolerance.admits(now, claim.number) else "not "
    number = "" if claim.number is None else f" of {quoted(claim.number, claim.unit)}"
    return (
        f"{item.setting.label} alone changed from {before} to {_word(item, cause.to)}"
        f"{_side(cause, check)} gives {rounded(now, claim.unit)} instead of "
        f"{rounded(was, claim.unit)} ({_cells(change.after, take)}, {cause.matrix}): "
        f"{reaches}{asked(check, claim.unit)}{number}."
    )


def _word(item: Described, value: object) -> str:
    """The value of a setting as readers know it."""
    return strategies.label(str(value)) if item.name == "strategy" else item.written(value)


def _side(cause: Cause, check: Check) -> str:
    """The cells in which a setting is changed, where these are not all that are compared."""
    chosen = getattr(check.compute, cause.side, None)
    if chosen is None or cause.setting in chosen.settings:
        return ""
    return f", of the cells with {', '.join(map(str, chosen.settings.values()))},"


def _cells(samples: Sequence[Sample], take: str) -> str:
    """The one cell, or how the number was taken from several."""
    models = ", ".join(sorted({str(sample.row.settings["model"]) for sample in samples}))
    if len(samples) == 1:
        return f"{models}, {samples[0].row.settings['link']}"
    return f"{take} of {len(samples)} cells ({models})"


def quoted(value: float | None, unit: Unit | None) -> str:
    """A paper's number as it stands in the file, with its unit; a dash where there is none."""
    return text.ABSENT if value is None else _with_unit(f"{value:,.12g}", unit)


def labelled(claim: Claim) -> str:
    """A paper's number, and how well it is known."""
    return f"{quoted(claim.number, claim.unit)} [{claim.label}]"


def rounded(value: float | None, unit: Unit | None) -> str:
    """One of our numbers, to as many digits as set it apart from the paper's."""
    # Ours is infinite where its cell has no figures.
    if value is None or isinf(value):
        return text.ABSENT
    # A share near 100 % is read by the part that is missing.
    return _with_unit(text.number(value, 4 if unit == "%" and 99 <= value < 100 else 3), unit)


def between(interval: tuple[float, float] | None, unit: Unit | None) -> str:
    """The ends of an interval, if there is one."""
    if interval is None:
        return ""
    low, high = (rounded(end, unit) for end in interval)
    return f"{low} to {high}"


def asked(check: Check, unit: Unit | None) -> str:
    """The tolerance in words."""
    tolerance = check.tolerance
    if tolerance.relative is not None:
        return f"within {_with_unit(f'{tolerance.relative * 100:g}', '%')}"
    if tolerance.at_least is not None:
        return f"at least {quoted(tolerance.at_least, unit)}"
    return f"at most {quoted(tolerance.at_most, unit)}"


def _with_unit(number: str, unit: Unit | None) -> str:
    return f"{number}{unit}" if unit == "×" else f"{number} {unit}"
