"""``python -m experiments trace``: the trace of one simulated cell."""

import json
from pathlib import Path

from tests.experiments.command_line import printed
from tests.experiments.stand_in import matrix_file


def test_the_step_of_one_cell_is_written(tmp_path: Path) -> None:
    file = tmp_path / "traces" / "step.json"
    options = ("--only", "fcdp-full-tiny-10mbit", "--output", file)
    assert "fcdp-full-tiny-10mbit-k1" in printed("trace", matrix_file(tmp_path), *options)
    trace = json.loads(file.read_text("utf-8"))
    assert trace["otherData"].pop("cell").startswith("fcdp-full-tiny-10mbit-k1")
    assert trace["otherData"] == {"evidence": "simulated"}
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"compute", "gather"} <= rows
