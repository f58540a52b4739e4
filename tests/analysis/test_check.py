"""A reader's own run, judged beside the committed one."""

from pathlib import Path

import pytest

from analysis.__main__ import RESULTS
from analysis.check import check
from experiments.records.record import Record, read
from tests.analysis.conftest import called, write_records
from tests.analysis.made_up import altered

VOLUME = RESULTS / "paper/volume/records.jsonl"
PARITY = RESULTS / "parity/records.jsonl"
LOSSES = "Where parameters come from changes no arithmetic; losses are those of ZeRO-3."


def twice(record: Record) -> Record:
    sent = record.measurement.inter_node_bytes_per_step
    return altered(record, inter_node_bytes_per_step=2 * sent)


def test_the_committed_run_passes_in_the_papers_units_and_no_verdict_on_another_number() -> None:
    (checked,) = check(VOLUME, RESULTS)
    assert {line.state for line in checked.lines} == {"same"}
    (zero3,) = [line for line in checked.lines if line.claim.endswith("ZeRO-3 sends a step.")]
    assert (zero3.paper, zero3.ours) == ("213.73 GB [2nd]", "211 GB")
    claim = "GPT-30B, LoRA r = 8, ZeRO++ sends in forward, a step."
    hpz, reshard = (line for line in checked.lines if line.claim == claim)
    assert (hpz.paper, hpz.ours) == ("108.18 GB [2nd]", "0 GB")
    by_range = "verdict by the paper's system: cannot be told here"
    assert hpz.outcome == f"not within 5 %; {by_range}"
    assert reshard.outcome.startswith("within 5 %; fit, which does not count; ")
    lines = str(check(RESULTS / "paper/bandwidth", RESULTS))
    assert "not within 15 %; context, which does not count; Over ZeRO-3" in lines
    assert f"within 15 %; {by_range}" in lines


def test_one_altered_record_fails_what_is_computed_from_it_alone(tmp_path: Path) -> None:
    records = [twice(r) if r.cell.strategy == "fcdp-sched" else r for r in read(VOLUME)]
    file = write_records(records, tmp_path / "records.jsonl")
    (checked,) = check(file, RESULTS)
    failed = [line.claim for line in checked.lines if line.state == "FAIL"]
    assert failed == ["GPT-30B, LoRA r = 8, FCDP-Sched sends a step."]
    result = called("check", file, status=1)
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    assert result.output.count("FAIL") == 1


def test_what_was_not_run_is_no_failure(tmp_path: Path) -> None:
    records = [r for r in read(VOLUME) if r.cell.strategy != "fcdp-sched"]
    file = write_records(records, tmp_path / "records.jsonl")
    (checked,) = check(file, RESULTS)
    lines = [line for line in checked.lines if "FCDP-Sched" in line.claim]
    assert {line.state for line in lines} == {"not run"}
    assert {line.state for line in checked.lines if line not in lines} == {"same"}
    result = called("check", file)
    assert "committed 57.9 GB, yours –\n" in result.output
    all_, lacking = len(checked.lines), len(lines)
    have = f"{all_ - lacking} of {all_} comparisons have the committed number"
    assert result.output.splitlines()[-1] == f"{have}; {lacking} not run"


def test_cells_without_a_result_fail_if_they_ran(tmp_path: Path) -> None:
    """Without the baseline a speed-up has no end, which is as fast as any claim asks for."""

    def failed(record: Record) -> Record:
        return record.model_copy(update={"state": "failed", "measurement": None})

    lost = [failed(r) if r.cell.strategy == "fcdp-sched" else r for r in read(VOLUME)]
    (checked,) = check(write_records(lost, tmp_path / "lost.jsonl"), RESULTS)
    lines = [line for line in checked.lines if "FCDP-Sched" in line.claim]
    assert {(line.state, line.difference) for line in lines} == {("FAIL", "cells ended failed")}
    file = RESULTS / "paper/bandwidth/records.jsonl"
    lost = [failed(r) if r.cell.strategy == "fsdp2" else r for r in read(file)]
    (checked,) = check(write_records(lost, tmp_path / "none.jsonl"), RESULTS)
    assert "other" not in {line.state for line in checked.lines}


def with_losses(factor: float) -> list[Record]:
    """The committed run, but FCDP's losses differ from FSDP2's by ``factor`` times as much."""
    records = read(PARITY)
    ran = [record for record in records if record.measurement]
    sides = [[r for r in ran if r.cell.strategy == name] for name in ("fcdp", "fsdp2")]
    moved = {}
    for ours, theirs in zip(*sides, strict=True):
        pairs = zip(ours.measurement.losses, theirs.measurement.losses, strict=True)
        moved[ours.cell_id] = altered(ours, losses=[b + factor * (a - b) for a, b in pairs])
    return [moved.get(record.cell_id, record) for record in records]


@pytest.mark.parametrize(("factor", "state"), [(0.5, "other"), (1.5, "other"), (1e4, "FAIL")])
def test_the_paper_comes_first_and_the_committed_number_second(
    tmp_path: Path, factor: float, state: str
) -> None:
    (checked,) = check(write_records(with_losses(factor), tmp_path / "records.jsonl"), RESULTS)
    (line,) = [line for line in checked.lines if line.claim == LOSSES]
    assert line.state == state
    assert {of.state for of in checked.lines if of != line} == {"same"}


def test_a_part_is_compared_with_the_same_part(tmp_path: Path) -> None:
    """A maximum over three models is another one over a single one of them."""
    file = RESULTS / "paper/bandwidth/records.jsonl"
    records = [r for r in read(file) if r.cell.model.name == "gpt-10b"]
    (checked,) = check(write_records(records, tmp_path / "records.jsonl"), RESULTS)
    assert {line.state for line in checked.lines} <= {"same", "not run"}
    (whole,) = check(file, RESULTS)
    assert {line.state for line in whole.lines} == {"same"}
    assert any(part.ours != of.ours for part, of in zip(checked.lines, whole.lines, strict=True))


def test_a_matrix_that_tests_no_claim_is_named() -> None:
    with pytest.raises(ValueError, match=r"no claim is tested by delta; .* paper/volume"):
        check(RESULTS / "delta", RESULTS)
