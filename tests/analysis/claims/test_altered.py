"""No verdict is built in: other records give another one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from analysis.claims import papers
from analysis.claims.computations import SCALES, Outcome, Ratio, Value, taken
from analysis.claims.papers import Check, Claim, Claims
from analysis.claims.verdicts import judge
from analysis.load.rows import Row
from experiments.records.record import Record

#: A bound may hold by a margin; it falls at one of these powers of two.
POWERS = range(1, 9)
CLAIMS = papers.load()
DECIDING = [
    (claim, check) for claim in CLAIMS.claims for check in claim.checks if check.role == "result"
]


def verdict(claim: Claim, check: Check, rows: Sequence[Row]) -> str:
    # As if a paper gave its number, where none does.
    alone = claim.model_copy(update={"checks": (check,), "label": "text"})
    of = Claims(papers=CLAIMS.papers, matrices=CLAIMS.matrices, claims=(alone,))
    (finding,) = judge(of, {check.matrix: rows})
    return finding.verdict


def altered(check: Check, rows: Sequence[Row], factor: float) -> list[Row]:
    """The rows with the compared quantity multiplied; in place of 0 it is a billion."""
    compute = check.compute
    changed = []
    for row in rows:
        value = row.quantities.get(compute.quantity)
        if value is not None and compute.of.matches(row):
            row = replace(
                row,
                quantities={**row.quantities, compute.quantity: value * factor or factor * 1e9},
                record=_timed(row.record, factor=factor),
            )
        changed.append(row)
    return changed


def _away(claim: Claim, check: Check, rows: Sequence[Row]) -> float:
    """The factor on the records that makes ours the paper's number."""
    compute = check.compute
    ours, paper = taken(compute.samples(rows), compute.take), claim.number / SCALES[claim.unit]
    if isinstance(compute, Value) or compute.kind == "ratio":
        if check.tolerance.at_least is not None:
            paper *= 1 + 1e-9  # a bound that rounding does not pass
        # In place of 0 it is 1e9: see ``altered``.
        return paper / ours if ours else paper / 1e9
    return (1 - paper) / (1 - ours) if compute.kind == "reduction" else (1 + paper) / (1 + ours)


def _timed(record: Record | None, times: int = 1, factor: float = 1.0) -> Record | None:
    """The record with so many times its rounds, and each so many times as fast."""
    if record is None or record.measurement is None:
        return record
    steps = [seconds / factor for seconds in record.measurement.in_whole_rounds]
    measured = record.measurement.model_copy(update={"step_seconds": times * steps})
    return record.model_copy(update={"measurement": measured})


@pytest.mark.parametrize(
    ("claim", "check"), DECIDING, ids=[f"{claim.id}-{check.matrix}" for claim, check in DECIDING]
)
def test_a_verdict_rests_on_its_records(
    claim: Claim, check: Check, committed: Mapping[str, Sequence[Row]]
) -> None:
    rows = committed[check.matrix]
    before = verdict(claim, check, rows)
    if before == "undecided":
        # Many more rounds with the same noise would decide it.
        rows = [replace(row, record=_timed(row.record, times=100)) for row in rows]
        before = verdict(claim, check, rows)
    if isinstance(check.compute, Outcome):
        sampled = {id(sample.row) for sample in check.compute.samples(rows)}
        swapped = [
            replace(row, state="ok" if row.state == "oom" else "oom") if id(row) in sampled else row
            for row in rows
        ]
        assert before == "not reproduced" or verdict(claim, check, swapped) != before
        return
    if before == "not reproduced":
        assert verdict(claim, check, altered(check, rows, 1.0)) == before
        if claim.number and isinstance(check.compute, Ratio | Value):
            # Records with the paper's number would reproduce it.
            assert verdict(claim, check, altered(check, rows, _away(claim, check, rows))) != before
        return
    exact = check.tolerance.relative is not None and check.compute.kind in ("ratio", "value")
    if exact and check.tolerance.relative < 0.5:
        for factor in (2.0, 0.5):
            assert verdict(claim, check, altered(check, rows, factor)) == "not reproduced"
        return
    factors = [2.0**power for power in POWERS] + [0.5**power for power in POWERS]
    after = {verdict(claim, check, altered(check, rows, factor)) for factor in factors}
    assert "not reproduced" in after
