"""A sweep's cells are a matrix's, and each is run once, whichever of W&B's runs asks for it."""

import itertools
from pathlib import Path

import pytest
import yaml

from experiments import terminal
from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.select import chosen
from tests.experiments.command_line import command, refused
from tests.experiments.stand_in import matrix_file, take_the_place_of_clusters

SWEEP = (ROOT / "experiments/sweeps/tau-batch.yaml").read_text()
DEFINITION = yaml.safe_load(SWEEP)
VALUES = {name: parameter["values"] for name, parameter in DEFINITION["parameters"].items()}
POINTS = [dict(zip(VALUES, point, strict=True)) for point in itertools.product(*VALUES.values())]


def test_the_sweep_and_its_matrix_have_the_same_cells() -> None:
    cells = reader.read("tau-batch").cells
    patterns = (",".join(f"{name}={value}" for name, value in point.items()) for point in POINTS)
    picked = [of for pattern in patterns for of in chosen(cells, pattern)]
    assert sorted(of.id for of in picked) == sorted(of.id for of in cells)
    assert DEFINITION["metric"]["name"] == "tokens_per_s"


def test_a_cell_of_a_sweep_is_run_once_and_written_as_the_agents_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same sweep asks for the same cell: it is not measured again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SWEEP_ID", "a-sweep")
    monkeypatch.setattr(terminal, "raise_them", lambda: None)
    take_the_place_of_clusters(monkeypatch.setattr, {})
    words = ("run", matrix_file(tmp_path), "--resume", "--only")
    for run in ("first", "second"):
        monkeypatch.setenv("WANDB_RUN_ID", run)
        (tmp_path / "runs/small/report").mkdir(parents=True, exist_ok=True)
        result = command(*words, "strategy=fcdp,inter_bandwidth=10 Mbit/s")
        assert result.exit_code == 0, result.output
        assert len((tmp_path / "runs/small/records.jsonl").read_text().splitlines()) == 1
    runs = (tmp_path / "runs/small/wandb").glob("offline-run-*")
    assert sorted(path.name.rpartition("-")[2] for path in runs) == ["first", "second"]
    message = refused(*words, "strategy=fcdp")
    assert message == "error: --only: a W&B sweep's run is of one cell, and not 2"
