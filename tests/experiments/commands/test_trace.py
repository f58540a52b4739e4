"""``python -m experiments trace``: the trace of one simulated cell."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from experiments.__main__ import app
from tests.experiments.stand_in import matrix_file


def test_the_step_of_one_cell_is_written(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "step.json"
    options = ["--only", "fcdp-full-tiny-10mbit", "--output", str(file)]
    result = CliRunner().invoke(app, ["trace", str(matrix_file(tmp_path)), *options])
    assert result.exit_code == 0, result.output
    assert "fcdp-full-tiny-10mbit-k1" in result.output
    trace = json.loads(file.read_text("utf-8"))
    assert trace["otherData"].pop("cell").startswith("fcdp-full-tiny-10mbit-k1")
    assert trace["otherData"] == {"evidence": "simulated"}
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"compute", "gather"} <= rows
