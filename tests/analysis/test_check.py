"""A reader's own run, judged beside the committed one."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.__main__ import RESULTS, app
from analysis.check import check
from experiments.records.record import Record, read
from tests.analysis.conftest import write_records
from tests.analysis.made_up import altered

VOLUME = RESULTS / "paper/volume/records.jsonl"


def twice(record: Record) -> Record:
    sent = record.measurement.inter_node_bytes_per_step
    return altered(record, inter_node_bytes_per_step=2 * sent)


def test_the_committed_run_passes_in_the_papers_units() -> None:
    (checked,) = check(VOLUME, RESULTS)
    assert [line.claim for line in checked.lines if line.problem] == []
    (zero3,) = [line for line in checked.lines if line.claim.endswith("ZeRO-3 sends a step.")]
    assert (zero3.paper, zero3.ours) == ("213.73 GB [2nd]", "211 GB")
    assert "differs; context; Over ZeRO-3" in str(check(RESULTS / "paper/bandwidth", RESULTS))


def test_one_altered_record_fails_what_is_computed_from_it_alone(tmp_path: Path) -> None:
    records = [twice(r) if r.cell.strategy == "fcdp-sched" else r for r in read(VOLUME)]
    file = write_records(records, tmp_path / "records.jsonl")
    (checked,) = check(file, RESULTS)
    failed = [line.claim for line in checked.lines if line.problem]
    assert failed == ["GPT-30B, LoRA r = 8, FCDP-Sched sends a step."]
    result = CliRunner().invoke(app, ["check", str(file)])
    assert result.exit_code == 1
    assert max(map(len, result.output.splitlines()[1:])) <= 80
    assert result.output.count("FAIL") == 1


def test_a_matrix_that_tests_no_claim_is_named() -> None:
    with pytest.raises(ValueError, match=r"no claim is tested by delta; .* paper/volume"):
        check(RESULTS / "delta", RESULTS)
