"""Each claim against the records: the number, the verdict, and the reason that goes with it."""

from typing import Any

from analysis.claims.papers import Claims, MatrixUse
from analysis.claims.verdicts import Finding, judge
from analysis.load.rows import Row, row
from tests.analysis import made_up
from tests.analysis.claims.made_up import claim, content

RATIO = {
    "kind": "ratio",
    "quantity": "inter_node_bytes",
    "of": {"strategy": "fcdp", "tuning": "full"},
    "over": {"strategy": "fsdp2"},
}


def claims(*checks: dict[str, Any]) -> Claims:
    values = content(claim(*checks, number=0.3))
    values["papers"]["fcdp"]["untested"] = "Not built."
    values["matrices"]["study"] = {"command": "run"}
    return Claims.model_validate(values)


def check(**changes: Any) -> dict[str, Any]:
    return {"matrix": "parity", "compute": RATIO, "tolerance": {"relative": 0.1}, **changes}


def rows(evidence: Any = "emulated") -> list[Row]:
    cells = [made_up.cell(name, link=made_up.LINKS[0]) for name in ("fsdp2", "fcdp")]
    return [row(made_up.record(cell, evidence=evidence)) for cell in cells]


def judged(of: Claims, **changes: Any) -> Finding:
    (finding,) = judge(of, {"parity": rows(), **changes})
    return finding


def test_what_was_not_run_says_why_and_a_missing_reason_is_stated() -> None:
    without = judged(claims(check(tolerance={"at_most": 0.1})))
    assert without.reasons == ("No reason has been found yet.",)
    without_records = judged(claims(check(matrix="study")))
    nothing = judged(claims(check(compute={**RATIO, "of": {"strategy": "ddp"}})))
    untested = judged(claims())
    assert {f.verdict for f in (without_records, nothing, untested)} == {"not run"}
    assert without_records.reasons == ("There are no records of its matrix.",)
    assert nothing.reasons == ("No cell of parity has a result with which to compare.",)
    assert untested.reasons == ("Not built.",)
    assert without_records.ours is None


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
    finding = judged(claims(check()), parity=[*rows("simulated"), *rows("measured")])
    assert finding.evidence == "measured"
    assert finding.cells == "gpt2-4x128, 10 Mbit/s"
