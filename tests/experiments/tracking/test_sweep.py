"""A sweep's cells are a matrix's, and one process writes the run that W&B's agent has made."""

import itertools
import os
import sys
from collections.abc import Iterator
from multiprocessing import Queue
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb import wandb_agent
from wandb.apis.public import sweeps

from experiments import terminal
from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.record import read
from experiments.records.select import chosen
from tests.experiments.command_line import command, refused
from tests.experiments.stand_in import matrix_file, take_the_place_of_clusters
from tests.experiments.tracking import offline

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


def test_wandbs_agent_takes_a_sweep_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every twelfth point of the grid, by W&B's agent, read back from the offline files."""
    sampled, commands = POINTS[::12], _commands(POINTS[::12])
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"WANDB_SWEEP_ID": "a-sweep", "PATH": path, "PYTHONPATH": str(ROOT)}
    of_the_agent = dict.fromkeys(("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"), "")
    for name, value in (environment | of_the_agent).items():
        monkeypatch.setenv(name, value)
    # A file in the place of W&B's server; cells run on the stand-in cluster.
    config = SWEEP.replace("-m experiments ", "-m tests.experiments.stand_in ")
    for owner, name, value in (
        (sweeps, "_sweep_with_runs", lambda *_: {"config": config}),
        (sweeps, "_register_agent", lambda *_, **__: {"id": "an-agent"}),
        (sweeps, "_agent_heartbeat", lambda *_: next(commands)),
        (wandb, "Api", lambda *_, **__: None),
        (wandb_agent.Agent, "POLL_INTERVAL", 0.1),
    ):
        monkeypatch.setattr(owner, name, value)
    wandb_agent.Agent(None, Queue(), sweep_id="a-sweep").run()  # type: ignore[no-untyped-call]
    runs = offline.runs(tmp_path / "runs/tau-batch")
    assert [run.id for run in runs] == ["run0", "run1"]
    assert [{name: run.config[name] for name in VALUES} for run in runs] == sampled
    assert {run.sweep for run in runs} == {"a-sweep"}
    records = read(tmp_path / "runs/tau-batch/records.jsonl")
    metric = DEFINITION["metric"]["name"]
    assert [run.summary[metric] for run in runs] == [record.tokens_per_s for record in records]
    assert all(run.history for run in runs)


def _commands(points: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Answers of a grid's server to one heartbeat after another."""
    for number, point in enumerate(points):
        arguments = {name: {"value": value, "desc": None} for name, value in point.items()}
        yield [{"type": "run", "run_id": f"run{number}", "args": arguments, "program": None}]
        # One at a time, as an agent has them: nothing more until it has ended.
        for _ in range(2500):
            if any(Path("runs").glob(f"*/wandb/offline-run-*-run{number}/complete")):
                break
            yield []
    yield [{"type": "exit"}]
