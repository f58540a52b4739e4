"""A matrix on ranks, and what W&B has of it."""

import json
import os
import sys
from pathlib import Path

import pytest

from experiments.records.record import read
from experiments.tracking import export
from tests import programs
from tests.experiments.stand_in import matrix_file
from tests.experiments.tracking import offline


@pytest.mark.usefixtures("privileged")
def test_live_and_exported_histories_are_the_same_points(tmp_path: Path) -> None:
    """Means over ranks, with seconds of the slowest, and none of warm-up: those of the record."""
    cluster = {"cluster": "nodes: 2, ranks_per_node: 2", "links": "100 Mbit/s", "timeout_s": 120}
    file = matrix_file(tmp_path, strategies="fcdp", **cluster)
    usual = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    words = ("--output", tmp_path / "run", "--set", "tuning=lora", "--set", "warmup_steps=2")
    command = (sys.executable, "-m", "experiments", "run", file, *words)
    programs.printed(*command, environment=usual, within_s=240)
    (record,) = read(tmp_path / "run" / "records.jsonl")
    assert export([record], tmp_path).runs == 1
    live, exported = (
        {run.name: [_point(point) for point in run.history] for run in offline.runs(directory)}
        for directory in (tmp_path / "run", tmp_path)
    )
    assert live.pop("small-report")
    assert live == exported
    points = live[record.cell_id]
    assert [point["loss"] for point in points] == record.measurement.losses
    seconds = [point.get("step_seconds") for point in points]
    assert seconds == [None, None, *record.measurement.step_seconds]
    alone = (tmp_path / "run/cells" / record.cell_id / "progress.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in alone] != record.measurement.losses


def _point(point: dict[str, float]) -> dict[str, float]:
    """Without the time at which it was written, which is the training's or the export's."""
    return {name: value for name, value in point.items() if name not in ("_timestamp", "_runtime")}
