"""Each claim against the records: the number, the verdict, and the reason that goes with it."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.claims.papers import Claims, MatrixUse
from analysis.claims.verdicts import Finding, asked, judge, quoted, rounded, summarise
from analysis.load.rows import Row, row
from tests.analysis import made_up

GPT2, _ = made_up.MODELS
SLOW = made_up.LINKS[0]
RATIO = {
    "kind": "ratio",
    "quantity": "inter_node_bytes",
    "of": {"strategy": "fcdp", "tuning": "full"},
    "over": {"strategy": "fsdp2"},
}


def claims(*checks: dict[str, Any], **changes: Any) -> Claims:
    claim = {
        "id": "bytes",
        "paper": "p",
        "where": "here",
        "claim": "Sends less.",
        "label": "text",
        "number": 0.3,
        "unit": "×",
        "checks": list(checks),
        **changes,
    }
    papers = {"p": {"title": "P", "arxiv": "0000.00000", "untested": "Not built."}}
    matrices = {"parity": {}, "soon": {"planned": "Not run yet."}}
    values = {"papers": papers, "matrices": matrices, "claims": [claim]}
    return Claims.model_validate(values)


def check(**changes: Any) -> dict[str, Any]:
    return {"matrix": "parity", "compute": RATIO, "tolerance": {"relative": 0.1}, **changes}


def rows(evidence: Any = "emulated") -> list[Row]:
    cells = [made_up.cell(name, GPT2, "full", SLOW) for name in ("fsdp2", "fcdp")]
    return [row(made_up.record(cell, evidence=evidence)) for cell in cells]


def found(of: Claims, **changes: Any) -> Finding:
    (finding,) = judge(of, {"parity": rows(), **changes})
    return finding


def test_near_enough_is_reproduced_and_says_how_to_read_it() -> None:
    finding = found(claims(check(note="By the counters.", because="Never shown.")))
    assert finding.verdict == "reproduced"
    assert finding.ours == pytest.approx(3.3 / 10.4)
    assert finding.evidence == "emulated"
    assert finding.cells == "gpt2-4x128, 10 Mbit/s"
    assert finding.reasons == ("By the counters.",)


def test_too_far_is_not_reproduced_with_the_reason_found() -> None:
    far = check(tolerance={"at_least": 0.5}, note="A note.", because="A reason.")
    finding = found(claims(far))
    assert finding.verdict == "not reproduced"
    assert finding.reasons == ("A note.", "A reason.")


def test_a_missing_reason_is_said() -> None:
    assert found(claims(check(tolerance={"at_most": 0.1}))).reasons == (
        "No reason has been found yet.",
    )


def test_what_was_not_run_says_why() -> None:
    planned = found(claims(check(matrix="soon")))
    nothing = found(claims(check(compute={**RATIO, "of": {"strategy": "ddp"}})))
    untested = found(claims())
    assert {f.verdict for f in (planned, nothing, untested)} == {"not run"}
    assert planned.reasons == ("Not run yet.",)
    assert nothing.reasons == ("No cell of parity has a result with which to compare.",)
    assert untested.reasons == ("Not built.",)
    assert planned.ours is None


def test_a_comparison_of_times_says_that_they_are_noisy() -> None:
    timed = check(compute={**RATIO, "quantity": "tokens_per_s"}, tolerance={"at_least": 0})
    of = claims(check(), timed)
    noisy = of.model_copy(
        update={"matrices": {"parity": MatrixUse(noise="Others used the machine.")}}
    )
    by_bytes, by_time = judge(noisy, {"parity": rows()})
    assert by_bytes.reasons == ()
    assert by_time.reasons[0] == "Others used the machine."


def test_kinds_of_evidence_are_not_mixed_and_measured_goes_first() -> None:
    finding = found(claims(check()), parity=[*rows("simulated"), *rows("measured")])
    assert finding.evidence == "measured"
    assert finding.cells == "gpt2-4x128, 10 Mbit/s"


@pytest.mark.parametrize(
    ("tolerances", "matrices", "summary"),
    [
        ([1, 1], ["parity", "soon"], "reproduced"),
        ([1, 0.001], ["parity", "parity"], "reproduced in part"),
        ([0.001], ["parity"], "not reproduced"),
        ([1], ["soon"], "not run"),
    ],
)
def test_a_claim_is_summarised_over_the_checks_that_were_run(
    tolerances: list[float], matrices: list[str], summary: str
) -> None:
    checks = [
        check(matrix=matrix, tolerance={"relative": tolerance})
        for matrix, tolerance in zip(matrices, tolerances, strict=True)
    ]
    assert summarise(judge(claims(*checks), {"parity": rows()})) == {"bytes": summary}


@pytest.mark.parametrize(
    ("role", "near", "far"),
    [
        ("context", "agrees", "differs"),
        ("set-up", "as set up", "not as set up"),
        ("consistency", "consistent", "inconsistent"),
        ("fit", "fitted", "fitted"),
    ],
)
def test_only_results_decide(role: str, near: str, far: str) -> None:
    others = [check(role=role), check(role=role, tolerance={"at_least": 1})]
    of = claims(check(), *others)
    result, *apart = judge(of, {"parity": rows()})
    assert [finding.verdict for finding in apart] == [near, far]
    assert not any(finding.decides for finding in apart)
    assert summarise([result, *apart]) == {"bytes": "reproduced"}
    assert summarise(apart) == {"bytes": "not judged"}


def test_numbers_are_written_as_the_paper_has_them_and_ours_with_three_digits() -> None:
    assert quoted(110.25, "GB") == "110.25 GB"
    assert quoted(22810, "words/s") == "22,810 words/s"
    assert quoted(None, "×") == rounded(None, None) == "–"
    assert rounded(1.4628, "×") == "1.46×"
    assert rounded(99.8834, "%") == "99.88 %"
    assert rounded(98.2353, "%") == "98.2 %"


def test_a_tolerance_is_put_into_words() -> None:
    of = claims(check(), check(tolerance={"at_least": 1}), check(tolerance={"at_most": 2.5}))
    (claim,) = of.claims
    assert [asked(item, claim.unit) for item in claim.checks] == [
        "within 10 %",
        "at least 1×",
        "at most 2.5×",
    ]
