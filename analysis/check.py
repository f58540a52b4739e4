"""A reader's own run, judged by the claims that its matrix tests, beside the committed run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from analysis.claims import papers
from analysis.claims.papers import Claims
from analysis.claims.verdicts import Finding, asked, between, judge, labelled, rounded
from analysis.load import matrices, runs, table
from analysis.load.rows import row
from analysis.paper.region import region
from experiments.records.record import Record

#: Tolerance relative to the committed number, for numbers that are not timed.
NEAR = 0.01
#: How the reader's number compares: it is the committed one; another one, which is what the paper's
#: tolerance asks for or nearer to the paper's than the committed one; there is none; or none of it.
State = Literal["same", "other", "not run", "FAIL"]
#: Verdicts that rest on more than the one number beside them.
_OF_THE_CLAIM = ("fitted", "over the whole range", "in part of the range", "outside the range")


@dataclass(frozen=True)
class Line:
    """One comparison: the paper's number, the committed one, and the reader's."""

    claim: str
    paper: str
    committed: str
    ours: str
    #: Whether it is as near to the paper's as asked, and the verdict.
    outcome: str
    state: State
    #: How the reader's number differs from the committed one, or why there is none; else empty.
    difference: str


@dataclass(frozen=True)
class Checked:
    """One matrix's comparisons."""

    matrix: str
    lines: list[Line]
    #: The command that runs it, and what the committed run took.
    command: str
    resources: str


def check(records: Path, results: Path) -> list[Checked]:
    """Judge the records of a run, or of all runs below a directory, by matrix.

    Raises ``ValueError`` where there are none, or their matrix tests no claim.
    """
    loaded = table.load(records)
    claims = papers.load()
    tested = {check.matrix for claim in claims.claims for check in claim.checks}
    ran = dict.fromkeys(record.cell.matrix for record in loaded)
    if not tested.intersection(ran):
        raise ValueError(
            f"{records}: no claim is tested by {', '.join(ran)}; those that test some: "
            f"{', '.join(sorted(tested & matrices.named().keys()))}"
        )
    return [
        _checked(claims, matrix, [r for r in loaded if r.cell.matrix == matrix], results)
        for matrix in ran
        if matrix in tested
    ]


def _checked(claims: Claims, matrix: str, records: Sequence[Record], results: Path) -> Checked:
    testing = tuple(
        claim.model_copy(update={"checks": checks})
        for claim in claims.claims
        if (checks := tuple(check for check in claim.checks if check.matrix == matrix))
    )
    alone = claims.model_copy(update={"claims": testing})
    (committed,) = runs.load(results, matrix)
    ranges = region(claims).ranges
    mine = [row(record) for record in table.latest(records)]
    # A maximum over a part of the cells is another one than that over all of them.
    cells = [(of.settings, of.state == "skipped") for of in mine]
    shared = [of for of in committed.rows if (of.settings, of.state == "skipped") in cells]
    part = shared or committed.rows
    judged = (judge(alone, {matrix: of}, ranges) for of in (mine, part, committed.rows))
    resources = committed.resources
    if len(part) < len(committed.rows):
        resources += ", and is compared in the cells that yours has too"
    return Checked(
        matrix,
        [
            _line(ours, of_all if ours.ours is None else of_part)
            for ours, of_part, of_all in zip(*judged, strict=True)
        ],
        claims.command(matrix),
        resources,
    )


def _line(ours: Finding, committed: Finding) -> Line:
    claim = ours.claim
    assert ours.check is not None, "claims without checks have no matrix"
    sure = between(ours.interval, claim.unit)
    setting = ("context", ours.check.note) if ours.check.role == "context" else ()
    outcome = f"{asked(ours.check, claim.unit)}: {ours.verdict}"
    if ours.ours is not None and ours.verdict in _OF_THE_CLAIM:
        apart = "" if ours.check.tolerance.admits(ours.ours, claim.number) else "not "
        outcome = f"{apart}{asked(ours.check, claim.unit)}; the claim: {ours.verdict}"
    return Line(
        claim.claim,
        labelled(claim),
        rounded(committed.ours, claim.unit),
        f"{rounded(ours.ours, claim.unit)}{f' ({sure})' if sure else ''}",
        "; ".join(filter(None, (outcome, *setting))),
        *_compared(ours, committed),
    )


def _compared(ours: Finding, committed: Finding) -> tuple[State, str]:
    """The state of the reader's number, and how it differs from the committed one.

    The paper's number comes first: what is as near to it as asked, or nearer than the committed
    number is, does not fail. Where the simulated system was fitted to it, it proves nothing.
    """
    if ours.ours is None:
        return "not run", ours.reasons[0]
    if committed.ours is None:
        return "other", "there is no committed number"
    difference = _difference(ours, committed)
    assert ours.check is not None, "claims without checks have no matrix"
    if not difference or ours.check.role == "fit":
        return ("FAIL" if difference else "same"), difference
    paper = ours.claim.number
    if ours.check.tolerance.admits(ours.ours, paper):
        return "other", f"{difference}, but as near to the paper's as asked"
    if paper is not None and abs(ours.ours - paper) <= abs(committed.ours - paper):
        return "other", f"{difference}, but nearer to the paper's"
    return "FAIL", difference


def _difference(ours: Finding, committed: Finding) -> str:
    """How the reader's number differs from the committed one; empty if it does not.

    Numbers with intervals agree where these overlap, all others where they are within ``NEAR``.
    """
    if ours.evidence != committed.evidence:
        return f"{ours.evidence}, where the committed one is {committed.evidence}"
    assert ours.ours is not None, "it was run"
    assert committed.ours is not None, "of the same evidence"
    if ours.interval and committed.interval:
        (low, high), (least, most) = ours.interval, committed.interval
        return "" if low <= most and least <= high else "its interval is apart from the committed"
    away = abs(ours.ours - committed.ours)
    if ours.ours == committed.ours or away <= NEAR * abs(committed.ours):
        return ""
    return f"more than {NEAR:.0%} from the committed number"
