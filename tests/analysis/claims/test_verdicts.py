"""One function decides each verdict; a golden file has each claim's verdict and its records."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import RESULTS
from analysis.claims import papers
from analysis.claims.computations import Sample
from analysis.claims.papers import Check, Claim, Claims
from analysis.claims.verdicts import Finding, Judgement, Ranged, cells, decide, judge
from analysis.load import runs
from analysis.load.rows import Row, row
from analysis.paper.region import region
from tests.analysis import made_up
from tests.analysis.claims.made_up import claim, content

GOLDEN = Path(__file__).with_name("verdicts.csv")
RATIO = {
    "kind": "ratio",
    "quantity": "inter_node_bytes",
    "of": {"strategy": "fcdp", "tuning": "full"},
    "over": {"strategy": "fsdp2"},
}


def check(**changes: Any) -> dict[str, Any]:
    return {"matrix": "parity", "compute": RATIO, "tolerance": {"relative": 0.1}, **changes}


def found(agrees: bool | None, role: str = "result", evidence: Any = "emulated") -> Finding:
    """A finding of a comparison that ran, with one that noise does not let be told as ``None``."""
    sample = Sample(2.0, Row({}, "ok", evidence))
    of = Check.model_validate(check(role=role))
    return Finding(of, 2.0, agrees, None, None, (sample,), (), ())


NOT_RUN = Finding(Check.model_validate(check()), None, None, None, None, (), (), ())


def ranged(share: float, fitted: bool = False) -> Ranged:
    return Ranged(1.0, 3.0, share, "", 2.0, fitted)


@pytest.mark.parametrize(
    ("verdict", "findings", "range_"),
    [
        ("holds", [found(True)], None),
        ("holds", [found(True), found(None), NOT_RUN], None),
        ("does not hold", [found(False), found(None)], None),
        ("holds in part", [found(True), found(False)], None),
        ("cannot be told here", [found(None)], None),
        # Neither another setting nor a number that ours was fitted to decides anything.
        ("cannot be told here", [found(True, "context"), found(False, "fit")], None),
        ("holds", [found(True), found(False, "context"), found(False, "fit")], None),
        ("not run", [NOT_RUN], None),
        ("not run", [], None),
        # A range over what the paper leaves open decides a simulated result, and no other.
        ("holds", [found(False, evidence="simulated")], ranged(1.0)),
        ("does not hold", [found(True, evidence="simulated")], ranged(0.0)),
        ("cannot be told here", [found(True, evidence="simulated")], ranged(0.5)),
        ("cannot be told here", [found(True, evidence="simulated")], ranged(1.0, fitted=True)),
        ("holds", [found(True, evidence="measured")], ranged(0.0)),
    ],
)
def test_results_decide_a_verdict(
    verdict: str, findings: list[Finding], range_: Ranged | None
) -> None:
    of = Claim.model_validate(claim())
    assert decide(of, findings, range_) == verdict


def test_a_test_shows_what_no_result_does() -> None:
    of = Claim.model_validate(claim(shown_by=["tests/test_it.py::test_it"]))
    assert decide(of, []) == decide(of, [found(False, "context")]) == "shown by a test"
    assert decide(of, [found(False)]) == "does not hold"


def claims(*checks: dict[str, Any]) -> Claims:
    values = content(claim(*checks, number=0.3))
    values["papers"]["fcdp"]["untested"] = "Not built."
    values["matrices"]["study"] = {"command": "run"}
    return Claims.model_validate(values)


def rows(evidence: Any = "emulated") -> list[Row]:
    cells = [made_up.cell(name, link=made_up.LINKS[0]) for name in ("fsdp2", "fcdp")]
    return [row(made_up.record(cell, evidence=evidence)) for cell in cells]


def judged(of: Claims, **changes: Any) -> Judgement:
    (judgement,) = judge(of, {"parity": rows(), **changes})
    return judgement


def test_what_was_not_run_says_why_and_a_missing_reason_is_stated() -> None:
    without = judged(claims(check(tolerance={"at_most": 0.1})))
    assert without.findings[0].notes == ("No reason has been found yet.",)
    without_records = judged(claims(check(matrix="study")))
    nothing = judged(claims(check(compute={**RATIO, "of": {"strategy": "ddp"}})))
    assert {without_records.verdict, nothing.verdict, judged(claims()).verdict} == {"not run"}
    assert without_records.findings[0].notes == ("There are no records of its matrix.",)
    assert nothing.findings[0].notes == ("No cell of parity has a result with which to compare.",)
    assert without_records.findings[0].ours is None


def test_kinds_of_evidence_are_not_mixed_and_measured_goes_first() -> None:
    (finding,) = judged(claims(check()), parity=[*rows("simulated"), *rows("measured")]).findings
    assert finding.evidence == "measured"
    assert cells(finding, "×") == "gpt2-4x128, 10 Mbit/s"


def golden(committed: Sequence[runs.AnyRun]) -> str:
    """Each claim's verdict, the records that count for it, and those that do not.

    A hypothesis has no verdict, and no record counts for one.
    """
    known = papers.load()
    rows_of = {run.matrix: run.rows for run in committed}
    files = {run.matrix: run.file for run in committed}
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("id", "verdict", "records that count", "other records"))
    for of in judge(known, rows_of, region(known).ranges):
        by_part: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for finding in of.findings:
            counts = of.verdict is not None and finding.check.role == "result"
            by_part[counts][files[finding.check.matrix]] = None
        records = (" ".join(part) for part in by_part.values())
        lines.writerow((of.claim.id, of.verdict or "hypothesis", *records))
    return text.getvalue()


def test_verdicts_and_their_records_are_the_golden_ones(committed: Sequence[runs.AnyRun]) -> None:
    assert GOLDEN.read_text("utf-8") == golden(committed), (
        "a verdict or its records have changed; if that is meant: "
        "python -m tests.analysis.claims.test_verdicts"
    )


if __name__ == "__main__":
    GOLDEN.write_text(golden(runs.load(RESULTS)), "utf-8")
