"""A reader's own run, judged by the claims that its matrix tests, beside the committed run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.claims import papers
from analysis.claims.papers import Claims
from analysis.claims.verdicts import Finding, asked, between, judge, labelled, rounded
from analysis.load import matrices, runs, table
from analysis.load.rows import row
from analysis.paper.region import region
from experiments.records.record import Record

#: Tolerance relative to the committed number, for numbers that are not timed.
NEAR = 0.01


@dataclass(frozen=True)
class Line:
    """One comparison: the paper's number, the committed one, and the reader's."""

    claim: str
    paper: str
    committed: str
    ours: str
    tolerance: str
    verdict: str
    #: How the reader's number differs from the committed one; empty if it does not.
    problem: str


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
    theirs = judge(alone, {matrix: committed.rows}, ranges)
    ours = judge(alone, {matrix: [row(record) for record in table.latest(records)]}, ranges)
    return Checked(
        matrix,
        [_line(*pair) for pair in zip(ours, theirs, strict=True)],
        claims.command(matrix),
        committed.resources,
    )


def _line(ours: Finding, committed: Finding) -> Line:
    claim = ours.claim
    assert ours.check is not None, "claims without checks have no matrix"
    sure = between(ours.interval, claim.unit)
    setting = ("context", ours.check.note) if ours.check.role == "context" else ()
    return Line(
        claim.claim,
        labelled(claim),
        rounded(committed.ours, claim.unit),
        f"{rounded(ours.ours, claim.unit)}{f' ({sure})' if sure else ''}",
        asked(ours.check, claim.unit),
        "; ".join(filter(None, (ours.verdict, *setting))),
        _problem(ours, committed),
    )


def _problem(ours: Finding, committed: Finding) -> str:
    """How the reader's number differs from the committed one; empty if it does not.

    Numbers with intervals agree where these overlap, all others where they are within ``NEAR``.
    """
    if ours.ours is None:
        return ours.reasons[0]
    if ours.evidence != committed.evidence:
        return f"{ours.evidence}, where the committed one is {committed.evidence}"
    assert committed.ours is not None, "of the same evidence"
    if ours.interval and committed.interval:
        (low, high), (least, most) = ours.interval, committed.interval
        return "" if low <= most and least <= high else "its interval is apart from the committed"
    away = abs(ours.ours - committed.ours)
    if away > NEAR * abs(committed.ours) and ours.ours != committed.ours:
        return f"more than {NEAR:.0%} from the committed number"
    return ""
