"""New matrix files, which run as they are; dry runs with times, memory and cells left; traces."""

from pathlib import Path

import pytest

from experiments.matrix import reader
from experiments.records import provenance
from simulation import files
from tests.experiments.command_line import command, flat, printed, refused
from tests.experiments.stand_in import matrix_file, record


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "folder" / "own.yaml"
    printed("matrix", "new", file)
    return file


def test_a_new_file_is_a_matrix_and_none_is_overwritten(file: Path) -> None:
    matrix = reader.read(str(file))
    assert matrix.name == "own"
    # The policy does not multiply FSDP2's cells.
    subjects = [cell.subject for cell in matrix.cells]
    assert sorted(subjects) == ["fcdp"] * 2 + ["fcdp none"] * 2 + ["fsdp2"] * 2
    before = file.read_text()
    assert "is there already, and stays as it is" in refused("matrix", "new", file)
    assert file.read_text() == before


def test_a_dry_run_has_simulated_times_and_memory(file: Path) -> None:
    lines = printed("run", file, "--dry-run").splitlines()
    assert len(lines) == 7
    assert all(" s/step, " in line and " MB of this machine" in line for line in lines[:-1])
    assert lines[-1].startswith("own: 6 cells to run, 24 steps in all, 0 skipped; simulated, 0:")
    assert "GB per device" in printed("run", "paper/volume", "--dry-run")


def test_a_dry_run_says_what_is_skipped_and_starts_nothing(tmp_path: Path) -> None:
    rule = "skip:\n  - {when: {strategy: fcdp, inter_bandwidth: 10 Mbit/s}, reason: not today}\n"
    words = ("run", matrix_file(tmp_path, extra=rule), "--dry-run", "--output", tmp_path / "run")
    assert printed(*words).count("  skipped: not today") == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_honours_resume(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: [0])  # which nodes share, as the reader has it
    cells = reader.read(str(file)).cells
    for cell, state in ((cells[0], "ok"), (cells[1], "failed")):
        files.append(record(cell, state, "an error"), tmp_path / "run" / "records.jsonl")
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    for option, count in (("--no-wandb", 6), ("--resume", 4), ("--retry-failed", 5)):
        shown = printed("run", file, "--dry-run", "--output", tmp_path / "run", option)
        assert f"own: {count} cells to run" in shown
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


def test_instances_to_rent_have_a_price_and_what_is_not_simulated_says_why(file: Path) -> None:
    """The matrix limits no links: nothing limits those of rented nodes."""
    words = ("run", file, "--dry-run", "--instance", "g5.48xlarge")
    words = (*words, "--set", "inter_bandwidth=unshaped")
    priced = flat(command(*words, "--set", "dtype=bfloat16"))
    assert " MB per device" in priced
    assert " USD on 2 × g5.48xlarge (16.288 USD per hour)" in priced
    assert "dtype = 'float32': a simulated GPU computes in bfloat16" in flat(command(*words))
