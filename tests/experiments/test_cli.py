"""The command line: what it prints, and how it exits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from experiments import terminal
from experiments.records import provenance
from experiments.records.record import read as read_records
from experiments.runner.directory import RunDirectory
from tests import programs
from tests.experiments.command_line import command, printed
from tests.experiments.planted import PLANTED, markers
from tests.experiments.stand_in import matrix_file, take_the_place_of_clusters

pytestmark = pytest.mark.ranks


def stand_in(*arguments: object, status: int = 0, **cluster: Any) -> Result:
    """``run`` on a stand-in for a cluster, which draws no report unless it is told to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "raise_them", lambda: None)
        take_the_place_of_clusters(patch.setattr, cluster)
        result = command("run", *arguments)
    assert result.exit_code == status, result.stderr
    return result


def options(folder: Path, *more: str, **of_the_matrix: Any) -> list[str]:
    """Options of a small matrix's run without W&B, in a folder beside it."""
    file = str(matrix_file(folder, **of_the_matrix))
    return [file, "--output", str(folder / "run"), "--no-wandb", *more]


def test_help_says_what_it_does() -> None:
    shown = programs.ended(sys.executable, "-m", "experiments").stdout
    assert "Usage: python -m experiments" in shown
    assert printed("--version").startswith("fcdp ")


@pytest.mark.parametrize(
    ("cluster", "cores", "expected"),
    [
        ("nodes: 2", 1, "shared"),
        ("nodes: 2", 2, "own"),
        ("nodes: 2, cores: shared", 2, "shared"),
        ("kind: rented, nodes: 2", 2, "own"),
    ],
)
def test_emulated_nodes_have_cores_of_their_own_where_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, cores: int, expected: str
) -> None:
    monkeypatch.setattr(provenance, "cores", lambda: [*range(cores)])
    few = {"strategies": "fsdp2", "links": "unshaped", "cluster": f"{cluster}, ranks_per_node: 1"}
    shown = stand_in(*options(tmp_path, "--cluster", "emulated", **few)).stdout
    (record,) = read_records(tmp_path / "run" / "records.jsonl")
    assert (record.cell.cluster.kind, record.cell.cluster.cores) == ("emulated", expected)
    assert record.cores_per_node == (1 if expected == "own" else None)
    assert ("2 nodes × 1 ranks, cores of their own" in shown) == (expected == "own")


def test_a_run_from_start_to_report(tmp_path: Path) -> None:
    few = {"strategies": "fsdp2, fcdp", "links": "10 Mbit/s"}
    file, output = matrix_file(tmp_path, **few), tmp_path / "run"
    result = stand_in(file, "--output", output, report=True)
    assert len(read_records(output / "records.jsonl")) == 2
    lines = result.stdout.splitlines()
    assert "tiny · full · 10 Mbit/s · emulated" in lines
    assert f"records  {output}/records.jsonl" in lines
    for kind in ("table    ", "figure   ", "report   "):
        named = [line.removeprefix(kind) for line in lines if line.startswith(kind)]
        assert named
        assert all(Path(path).is_file() for path in named)
    assert f"W&B      {output}/wandb" in lines
    assert f"         upload with: wandb sync {output}/wandb/offline-run-*" in lines
    # One a cell, and one with the report.
    assert len(list((output / "wandb").glob("offline-run-*"))) == 3


def test_the_second_time_runs_afresh_and_resume_does_not(tmp_path: Path) -> None:
    words, directory = options(tmp_path), RunDirectory(tmp_path / "run")
    failing = {"fcdp-full-tiny-10mbit": "raise"}
    result = stand_in(*words, behaviours=failing, status=1)
    assert "failed 1 cell: RuntimeError: rank 1 raises" in result.stdout
    first = read_records(directory.records)
    stand_in(*words, "--resume", status=1)
    assert read_records(directory.records) == first
    stand_in(*words, "--retry-failed")
    repaired = read_records(directory.records)
    assert repaired[:5] == first[:5]
    assert repaired[5].state == "ok"
    (directory.path / "unrelated.txt").touch()
    result = stand_in(*words, "--only", "fsdp2")
    assert f"the earlier run is now in {directory.path}/earlier/" in result.stdout
    assert [r.cell.strategy for r in read_records(directory.records)] == ["fsdp2", "fsdp2"]
    assert repaired in map(read_records, directory.path.glob("earlier/*/records.jsonl"))
    assert len([*directory.cells.iterdir()]) == 2
    assert (directory.path / "unrelated.txt").exists()


def test_a_matrix_with_a_reference_fails_where_losses_differ(tmp_path: Path) -> None:
    words = options(tmp_path, extra="        reference: fsdp2\n", steps=4)
    assert "losses   6 of 6 cells reach fsdp2's" in stand_in(*words).stdout
    otherwise = {"fcdp-full-tiny-10mbit": "learn otherwise"}
    result = stand_in(*words, behaviours=otherwise, status=1)
    assert "losses   5 of 6 cells reach fsdp2's" in result.stdout
    (problem, *_) = result.stderr.splitlines()
    assert problem.startswith("fcdp-full-tiny-10mbit")
    assert problem.endswith("learns something else, which step 4 shows first")
    result = stand_in(*words, "--only", "fcdp", status=1)
    assert "was not compared: no fsdp2 trained with the same settings" in result.stderr


def test_a_report_that_cannot_be_drawn_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "have_drawn", lambda *_: "a reason")
    result = stand_in(*options(tmp_path, "--only", "fsdp2"), report=True, status=1)
    assert result.stderr.splitlines() == [
        "the report could not be drawn: a reason",
        f"try again with: python -m analysis report {tmp_path}/run/records.jsonl",
    ]


def test_no_secret_is_in_an_output_or_a_file(tmp_path: Path) -> None:
    output = tmp_path / "run"
    file = matrix_file(tmp_path, strategies="fsdp2, fcdp", links="10 Mbit/s")
    words = ("run", str(file), "--output", str(output))
    variables = {"STAND_IN": json.dumps({"behaviours": {"fcdp": "quote"}}), "WANDB_MODE": "offline"}
    words = ("-m", "tests.experiments.stand_in", *words)
    result = programs.ended(sys.executable, *words, **PLANTED, **variables)
    assert result.returncode == 1
    assert markers(result.stdout + result.stderr) == []
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [markers(path.read_text(errors="replace")) for path in files] == [[]] * len(files)
