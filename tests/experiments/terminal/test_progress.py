"""The display in a log and on a terminal, and checks of destinations."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import terminal
from experiments.matrix import reader
from experiments.matrix.files import parse
from experiments.runner.directory import Step
from experiments.terminal.progress import Progress, clock, seconds_left
from tests.experiments.command_line import rendered
from tests.experiments.stand_in import cell, record

#: In place of two models: none of these cells is skipped.
ONE_MODEL = parse(["model=gpt2-4x128"])


def run_displayed(console: Console, directory: Path, finished: int = 0) -> None:
    matrix = reader.read("quickstart", changes=ONE_MODEL)
    records = [*map(record, matrix.cells)]
    with Progress(matrix, matrix.cells, records[:finished], console) as progress:
        for of in matrix.cells[finished:]:
            progress.cell_started(of, directory, "2026-01-01T00:00:00+00:00")
            progress.cell_finished(record(of))


def test_a_log_has_one_line_a_cell(tmp_path: Path) -> None:
    text = io.StringIO()
    run_displayed(Console(file=text, width=120), tmp_path, finished=2)
    lines = text.getvalue().splitlines()
    assert lines[0] == "quickstart · 24 cells · emulated cluster, 2 nodes × 2 ranks"
    assert "2 cells are finished already" in lines
    assert lines[-22] == (
        " 3/24 ok      zero3            full    gpt2-4x128  100 Mbit/s    1,024   0.500    6.30"
        "   12s"
    )
    assert [line.split("/")[0].strip() for line in lines[-22:]] == [str(i) for i in range(3, 25)]
    assert "\x1b" not in text.getvalue()


def test_a_run_in_which_all_cells_are_skipped_is_shown(tmp_path: Path) -> None:
    """This is so where all of a matrix's links are limited, and the cluster limits none."""
    matrix = reader.read("quickstart", changes=ONE_MODEL)
    skipped = {each.id: "no limited links" for each in matrix.cells}
    matrix = replace(matrix, skipped=skipped)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    with Progress(matrix, matrix.cells, [], console) as progress:
        assert "0 of 0 cells" in rendered(progress.status())[-1]
        progress.cell_finished(record(matrix.cells[0], "skipped"))
    text = io.StringIO()
    with Progress(matrix, matrix.cells, [], Console(file=text, width=100)):
        pass
    assert "24 cells skipped: no limited links" in text.getvalue()


def test_a_terminal_shows_the_current_cell_and_the_whole_run(tmp_path: Path) -> None:
    matrix = reader.read("quickstart", changes=ONE_MODEL)
    first = matrix.cells[0]
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    with Progress(matrix, matrix.cells, [], console) as progress:
        progress.cell_started(first, tmp_path, "2026-01-01T00:00:00+00:00")
        lines = rendered(progress.status())
        assert lines[1].startswith(
            "now  deepspeed-zero3 · full · gpt2-4x128 · 100 Mbit/s  starting"
        )
        step = {"step": 2, "of": 4, "loss": 5.25, "seconds": 1.5, "at": 0.0}
        (tmp_path / "progress.jsonl").write_text(json.dumps(step) + "\n")
        lines = rendered(progress.status())
        assert lines[1].endswith("step 2 of 4, loss 5.2500, 1.50 s/step")
        assert "0 of 24 cells" in lines[2]
        assert lines[2].endswith("left")  # what the cell that runs still takes
        progress.cell_finished(record(first))
        lines = rendered(progress.status())
        assert "1 of 24 cells" in lines[1]
        assert "about 4:36 left" in lines[1]


def test_time_left_goes_by_the_link_and_by_the_cell_that_runs() -> None:
    slow, fast = 10**7, 10**8
    finished = [
        record(cell(inter_bandwidth_bits_per_s=link)).model_copy(update={"seconds": seconds})
        for link, seconds in ((slow, 90.0), (slow, 110.0), (fast, 10.0))
    ]
    remaining = [cell(inter_bandwidth_bits_per_s=link) for link in (slow, fast, None)]
    assert seconds_left(remaining, finished, elapsed=30.0) == pytest.approx(70 + 10 + 70)
    assert seconds_left(remaining, finished, elapsed=500.0) == pytest.approx(10 + 70)
    assert seconds_left(remaining, [], elapsed=1.0) is None
    remaining = [cell(inter_bandwidth_bits_per_s=link) for link in (slow, slow, fast)]
    step = Step(step=2, of=10, loss=1.0, seconds=5.0, at=0.0)
    # Eight steps are left of it; the others are taken for alike, with what it took to start.
    assert seconds_left(remaining, [], 20.0, step) == pytest.approx(40 + 60 + 60)
    assert seconds_left(remaining, finished[2:], 20.0, step) == pytest.approx(40 + 60 + 10)
    assert [*map(clock, (0, 59.6, 151, 3751))] == ["0:00", "1:00", "2:31", "1:02:31"]


def test_a_look_whether_a_file_can_be_written_writes_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "deep" / "new.json"
    old.write_text("{}")
    for file in (old, new):
        terminal.check_writable("--json", file)
    assert old.read_text() == "{}"
    assert set(tmp_path.rglob("*")) == {old, new.parent}
