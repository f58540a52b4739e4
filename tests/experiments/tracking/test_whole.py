"""A matrix on ranks, with a policy from a module outside of the tree, and what W&B has of it."""

import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis.__main__ import app
from experiments.records.record import Record, read
from experiments.tracking import export
from tests import programs
from tests.docs import block
from tests.experiments.command_line import printed
from tests.experiments.stand_in import matrix_file
from tests.experiments.tracking import offline

POLICY = "elsewhere.policies:FrozenOnly"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 2 × 2 ranks: FSDP2, FCDP, and FCDP with the policy of the page."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "policies.py").write_text(block("extend.md", "policy"))
    file = matrix_file(
        folder,
        "reference: fsdp2\n",
        cluster="nodes: 2, ranks_per_node: 2",
        strategies="fsdp2, fcdp",
        links="100 Mbit/s",
        timeout_s=120,
    )
    there = {"PYTHONPATH": f"{programs.ROOT}:{folder}", "COLUMNS": "200"}
    usual = {name: text for name, text in os.environ.items() if not name.startswith("WANDB_")}
    settings = ("tuning=lora", "warmup_steps=2", f"policy=[host, {POLICY}]")
    programs.printed(
        *(sys.executable, "-m", "experiments", "run", file, "--output", folder / "run"),
        *(word for setting in settings for word in ("--set", setting)),
        environment=usual,
        within_s=240,
        **there,
    )
    return folder / "run"


def records(ran: Path) -> dict[str, Record]:
    return {record.cell_id: record for record in read(ran / "records.jsonl")}


@pytest.mark.usefixtures("privileged")
def test_live_and_exported_histories_are_the_same_points(ran: Path, tmp_path: Path) -> None:
    """Means over ranks, with seconds of the slowest, and none of warm-up: those of the record."""
    assert export([*records(ran).values()], tmp_path).runs == 3
    live, exported = (
        {run.name: [_point(point) for point in run.history] for run in offline.runs(directory)}
        for directory in (ran, tmp_path)
    )
    assert live.pop("small-report")
    assert live == exported
    for name, record in records(ran).items():
        measured = record.measurement
        assert measured is not None
        assert [point["loss"] for point in live[name]] == measured.losses
        warm_up = [None] * record.cell.warmup_steps
        seconds = [point.get("step_seconds") for point in live[name]]
        assert seconds == [*warm_up, *measured.step_seconds]
        alone = (ran / "cells" / name / "progress.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in alone] != measured.losses


def _point(point: dict[str, float]) -> dict[str, float]:
    """Without the time at which it was written, which is the training's or the export's."""
    return {name: value for name, value in point.items() if name not in ("_timestamp", "_runtime")}


@pytest.mark.usefixtures("privileged")
def test_a_policy_of_another_module_is_run_compared_drawn_and_tagged(ran: Path) -> None:
    by_policy = {record.cell.subject: record for record in records(ran).values()}
    mine, host = by_policy[f"fcdp {POLICY}"], by_policy["fcdp"]
    assert (mine.state, mine.measurement.policy) == ("ok", POLICY)
    assert mine.measurement.losses == host.measurement.losses
    assert (
        mine.measurement.inter_node_bytes_closed_form
        >= host.measurement.inter_node_bytes_closed_form
    )
    table = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["table", str(ran)])
    assert f"FCDP {POLICY}" in table.output
    assert POLICY in printed("compare", f"{ran}:policy=host", f"{ran}:policy={POLICY}")
    assert any(POLICY in figure.read_text() for figure in (ran / "report").glob("*.svg"))
    assert POLICY in (ran / "report" / "comparison.md").read_text()
    tags = {run.name: run.tags for run in offline.runs(ran)}
    assert POLICY in tags[mine.cell_id]
