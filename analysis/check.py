"""A reader's own run, judged by the claims that its matrix tests, beside the committed run."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from pathlib import Path
from typing import Literal

from analysis.claims import papers
from analysis.claims.papers import Claim, Claims
from analysis.claims.verdicts import Finding, Judgement, asked, between, judge, labelled, rounded
from analysis.load import matrices, runs, table
from analysis.load.rows import Row, row
from analysis.paper.region import region
from experiments.records.record import Record

#: Tolerance relative to the committed number, for numbers that are not timed.
NEAR = 0.01
#: The reader's number is the committed one; another, as near to the paper's as asked or nearer than
#: the committed one; or none of these, though its cells ran.
State = Literal["same", "other", "not run", "FAIL"]


@dataclass(frozen=True)
class Line:
    """One comparison: the paper's number, the committed one, and the reader's."""

    claim: str
    paper: str
    committed: str
    ours: str
    #: Whether it is as near to the paper's number as asked, and the verdict, if it counts for one.
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
    tested = {check.matrix for claim in claims.every for check in claim.checks}
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
    def testing(claim: Claim) -> Claim:
        checks = tuple(check for check in claim.checks if check.matrix == matrix)
        return claim.model_copy(update={"checks": checks, "shown_by": ()})

    lists = {"claims": claims.claims, "hypotheses": claims.hypotheses}
    alone = claims.model_copy(update={k: tuple(map(testing, of)) for k, of in lists.items()})
    (committed,) = runs.load(results, matrix)
    ranges = region(claims).ranges
    mine, all_ = [row(record) for record in table.latest(records)], committed.rows
    # A maximum over a part of the cells is another one than that over all of them.
    cells = [(of.settings, of.state == "skipped") for of in mine]
    part = [of for of in all_ if (of.settings, of.state == "skipped") in cells] or all_
    partly = ", and is compared in the cells that yours has too" * (len(part) < len(all_))
    judged = (judge(alone, {matrix: rows}, ranges) for rows in (mine, part, all_))
    lines = [
        _line(yours, ours, of_all if ours.ours is None else of_part, mine)
        for yours, *others in zip(*judged, strict=True)
        for ours, of_part, of_all in zip(
            yours.findings, *(of.findings for of in others), strict=True
        )
    ]
    return Checked(matrix, lines, claims.command(matrix), f"{committed.resources}{partly}")


def _line(judged: Judgement, ours: Finding, committed: Finding, rows: Sequence[Row]) -> Line:
    claim, check = judged.claim, ours.check
    sure = between(ours.interval, claim.unit)
    within = ours.ours is not None and check.tolerance.admits(ours.ours, claim.number)
    near = f"{'' if within else 'not '}{asked(check, claim.unit)}"
    if judged.verdict is None:
        outcome: list[str | None] = [near, "a hypothesis"]
    elif check.role == "result":
        of_range = judged.ranged is not None and ours.evidence == "simulated"
        by = "the paper's system" if of_range else "this run"
        outcome = [near, f"verdict by {by}: {judged.verdict}"]
    else:
        outcome = [near, f"{check.role}, which does not count", check.note]
    return Line(
        claim.claim,
        labelled(claim),
        rounded(committed.ours, claim.unit),
        f"{rounded(ours.ours, claim.unit)}{f' ({sure})' if sure else ''}",
        "not run" if ours.ours is None else "; ".join(filter(None, outcome)),
        *_compared(judged, ours, committed, rows),
    )


def _compared(
    judged: Judgement, ours: Finding, committed: Finding, rows: Sequence[Row]
) -> tuple[State, str]:
    """The state of the reader's number, and how it differs from the committed one.

    The paper's number comes first: what is as near to it as asked, or nearer than the committed
    number is, does not fail. Where the simulated system was fitted to it, it proves nothing.
    """
    if committed.ours is None:
        return "not run" if ours.ours is None else "other", "there is no committed number"
    if ours.ours is None:
        of, over = ours.check.compute.of, getattr(ours.check.compute, "over", None)
        ran = {row.state for row in rows if of.matches(row) or (over and over.matches(row))}
        ended = ", ".join(sorted(ran - {"ok", "skipped"}))
        return ("FAIL", f"cells ended {ended}") if ended else ("not run", ours.notes[0])
    paper, difference = judged.claim.number, _difference(ours, committed)
    nearer = paper is not None and abs(ours.ours - paper) <= abs(committed.ours - paper)
    fitted = ours.check.role == "fit" or (judged.ranged is not None and judged.ranged.fitted)
    allowed = isfinite(ours.ours) and not fitted
    allowed &= nearer or ours.check.tolerance.admits(ours.ours, paper)
    state: State = "other" if allowed else "FAIL"
    return state if difference else "same", difference


def _difference(ours: Finding, committed: Finding) -> str:
    """How the reader's number differs from the committed one; empty if it does not.

    Numbers with intervals agree where these overlap, all others where they are within ``NEAR``.
    """
    if ours.evidence != committed.evidence:
        return f"{ours.evidence}, where the committed one is {committed.evidence}"
    if ours.interval and committed.interval:
        (low, high), (least, most) = ours.interval, committed.interval
        return "" if low <= most and least <= high else "its interval is apart from the committed"
    near = isclose(ours.ours or 0, committed.ours or 0, rel_tol=NEAR)
    return "" if near else f"more than {NEAR:.0%} from the committed number"
