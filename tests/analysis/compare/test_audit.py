"""The audit finds what a baseline must not do, and lets pass what is explained."""

from functools import cache
from pathlib import Path

import pytest

from analysis.compare.audit import Finding, audit, markdown
from experiments.records.record import Record, read
from simulation import files
from tests.analysis.conftest import called
from tests.experiments.golden import tables
from tests.programs import RESULTS


@cache
def committed(strategy: str, tuning: str = "full") -> Record:
    """The committed record of one micro-batch per step, of the matrix that has all strategies."""
    (found,) = (
        record
        for record in read(RESULTS / "parity/records.jsonl")
        if (record.cell.variant, record.cell.tuning, record.cell.accumulation)
        == (strategy, tuning, 1)
    )
    return found


def measured(of: Record, **changes: object) -> Record:
    assert of.measurement is not None
    return of.model_copy(update={"measurement": of.measurement.model_copy(update=changes)})


def sends(times: float, strategy: str, tuning: str = "full") -> Record:
    """The committed record, as if it had sent so many times the bytes that it has."""
    of = committed(strategy, tuning)
    assert of.measurement is not None
    sent = times * of.measurement.inter_node_bytes_per_step
    return measured(of, inter_node_bytes_per_step=sent)


def judged(times: float, strategy: str, tuning: str = "full") -> Finding:
    return audit([committed("fsdp2", tuning), sends(times, strategy, tuning)])[1]


LESS, MORE = "sends less than its schedule must", "sends more than is explained"


@pytest.mark.parametrize(("times", "strategy", "tuning", "sent"), tables(__file__))
def test_a_cell_is_judged_by_its_bytes(times: float, strategy: str, tuning: str, sent: str) -> None:
    problems = {"less": (LESS,), "more": (MORE,), "explained": ()}
    assert judged(times, strategy, tuning).problems == problems[sent]


@pytest.mark.parametrize(
    ("strategy", "problems"),
    [("hpz", ("learns something else, which step 4 shows first",)), ("qwz", ())],
)
def test_a_cell_is_judged_by_its_losses(strategy: str, problems: tuple[str, ...]) -> None:
    of = committed(strategy)
    assert of.measurement is not None
    *losses, last = committed("fsdp2").measurement.losses  # type: ignore[union-attr]
    _, finding = audit([committed("fsdp2"), measured(of, losses=[*losses, 1.003 * last])])
    assert finding.problems == problems


def test_a_wasteful_backend_is_explained() -> None:
    (finding,) = audit([committed("fsdp2")])
    (why,) = finding.explanations
    assert "is an all-reduce" in why
    table = markdown([finding])
    assert "| 2.0× [1] |" in table
    assert table.endswith("over that ring).\n")


def test_parameters_not_gathered_again_are_explained() -> None:
    finding = judged(0.49, "deepspeed-zero3")
    assert finding.problems == ()
    (why,) = finding.explanations
    assert "what it still holds from the end of forward" in why


def test_where_little_is_sent_headers_are_the_reason() -> None:
    (why,) = judged(1, "zeropp", "lora").explanations
    assert "Headers of small messages" in why
    finding = judged(1, "deepspeed-hpz", "lora")
    rings, whole = finding.explanations
    assert "3 times" in rings
    assert "gathers one by one all parameters that it keeps whole" in whole
    assert "3.7× [1] [2]" in markdown([finding])


def test_headline_sends_what_its_transport_and_headers_need() -> None:
    """Within 2 % of the closed form over the transport, headers included; differences have none."""
    findings = audit(read(RESULTS / "headline/records.jsonl.gz"))
    exact = [f.of_expected for f in findings if f.least]
    assert len(exact) == 72
    assert all(ratio is not None and abs(ratio - 1) < 0.02 for ratio in exact), exact


def test_bytes_without_a_closed_form_are_not_judged() -> None:
    """Of differences in both directions the simulator's own figure is a guess."""
    findings = audit(read(RESULTS / "headline/records.jsonl.gz"))
    changing = [f for f in findings if f.least == 0]
    assert {f.verdict for f in changing if f.cell.accumulation == 1} == {"bytes not judged"}
    assert not any(MORE in f.problems for f in findings)
    of = measured(committed("fcdp"), inter_node_bytes_closed_form=None)
    _, finding = audit([committed("fsdp2"), of])
    assert finding.verdict == "bytes not judged"
    assert "| bytes not judged |" in markdown([finding])


def test_on_gpus_reductions_are_no_all_reduces() -> None:
    finding, *_ = audit(read(RESULTS / "one-gpu/records.jsonl"))
    assert finding.cell.strategy == "fsdp2"
    assert finding.of_expected == pytest.approx(1, abs=0.02)


def test_cells_that_did_not_run_are_problems() -> None:
    error = "rank 1: Traceback\nIt | failed"
    failed = {"state": "failed", "error": error, "measurement": None}
    _, finding = audit([committed("fsdp2"), committed("fcdp").model_copy(update=failed)])
    assert finding.problems == ("did not run (failed): It | failed",)
    header, _, row = markdown([finding]).splitlines()[:3]
    assert header.count("|") == markdown([finding]).splitlines()[1].count("|") == 10
    assert row == (r"| fcdp | full | 1 | – | – | – | – | – | did not run (failed): It \| failed |")


def test_luwus_records_are_judged_by_their_bytes() -> None:
    findings = audit(read(RESULTS / "luwu/two/records.jsonl"))
    of_luwu = [finding for finding in findings if finding.cell.strategy == "luwu"]
    assert of_luwu
    problems = [problem for finding in of_luwu for problem in finding.problems]
    assert not any("sends" in problem for problem in problems), problems


@pytest.mark.parametrize(("times", "status"), [(1, 0), (2, 1)])
def test_the_command_fails_where_a_strategy_does(tmp_path: Path, times: float, status: int) -> None:
    file = tmp_path / "records.jsonl"
    files.append(committed("fsdp2"), file)
    files.append(sends(times, "fcdp"), file)
    assert "| fcdp | full | 1 |" in called("audit", file, status=status).stdout
