"""A sweep's cells are a matrix's, and one process writes the run that W&B's agent has made."""

import itertools
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from experiments import terminal
from experiments.commands.sweep_cell import pick
from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.record import read
from tests import programs
from tests.experiments.command_line import command
from tests.experiments.stand_in import matrix_file, take_the_place_of_clusters
from tests.experiments.tracking import offline

SWEEP = ROOT / "experiments/sweeps/tau-batch.yaml"


def test_the_sweep_and_its_matrix_have_the_same_cells() -> None:
    definition = yaml.safe_load(SWEEP.read_text())
    matrix = reader.read(definition["command"][definition["command"].index("sweep-cell") + 1])
    values = {name: given["values"] for name, given in definition["parameters"].items()}
    picked = [
        pick(matrix, [f"--{n}={v}" for n, v in zip(values, chosen, strict=True)])
        for chosen in itertools.product(*values.values())
    ]
    assert {each.cell.id for each in picked} == {entry.cell.id for entry in matrix.cells}
    assert definition["metric"]["name"] == "tokens_per_s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["policy=host"], "'policy=host' is not a setting and its value, as in --steps=10"),
        (["--tau=1"], "--SETTING: there is no setting 'tau'; "),
        (["--micro_batch=3"], "--SETTING: no cell has micro_batch '3'; there are 1, 2, 4, 8"),
        (["--micro_batch=2"], "5 cells of tau-batch are left, such as "),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pick(reader.read("tau-batch"), arguments)


#: Variables of W&B's agent, offline.
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SWEEP_ID": "a-sweep"}


@pytest.mark.ranks
def test_a_cell_of_a_sweep_is_run_once_and_written_as_the_agents_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same sweep asks for the same cell: it is not measured again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "raise_them", lambda: None)
    take_the_place_of_clusters(monkeypatch.setattr, {})
    settings = ("--strategy=fcdp", "--inter_bandwidth_bits_per_s=10000000")
    for run in ("first", "second"):
        words = ("sweep-cell", matrix_file(tmp_path), *settings)
        result = command(*words, **OFFLINE, WANDB_RUN_ID=run)
        assert result.exit_code == 0, result.output
        assert len((tmp_path / "runs/small/records.jsonl").read_text().splitlines()) == 1
    runs = (tmp_path / "runs/small/wandb").glob("offline-run-*")
    assert sorted(path.name.rpartition("-")[2] for path in runs) == ["first", "second"]


@pytest.mark.system
def test_wandbs_agent_takes_a_sweep_from_end_to_end(tmp_path: Path) -> None:
    """Every twelfth point of the grid, by W&B's agent, read back from the offline files."""
    words = ("-m", "tests.experiments.tracking.sweep_agent", SWEEP, "12")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**OFFLINE, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = programs.ended(sys.executable, *words, folder=tmp_path, within_s=250, **variables)
    found = offline.runs(tmp_path / "runs/tau-batch")
    points = [(run.id, run.config["policy"], run.config["micro_batch"]) for run in found]
    assert points == [("run0", "threshold(0)", 1), ("run1", "threshold(0.75)", 1)], (
        done.stdout + done.stderr
    )
    assert {run.sweep for run in found} == {"a-sweep"}
    metric = yaml.safe_load(SWEEP.read_text())["metric"]["name"]
    records = read(tmp_path / "runs/tau-batch/records.jsonl")
    assert [run.summary[metric] for run in found] == [record.tokens_per_s for record in records]
    assert all(run.history for run in found)
