"""The display in a log and on a terminal, the table at the end, and checks of destinations."""

import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import terminal
from experiments.matrix import reader
from experiments.matrix.files import parse
from experiments.records.record import Record
from experiments.runner.directory import Step
from experiments.terminal.progress import Progress, clock, seconds_left
from experiments.terminal.summary_table import summary
from tests.experiments.command_line import rendered
from tests.experiments.stand_in import cell, record


def comparison() -> list[Record]:
    """DeepSpeed, FSDP2 and FCDP on one model and link; FCDP sends two thirds in half the time."""
    return [
        record(cell(strategy="deepspeed-zero3"), inter_node_bytes_closed_form=None),
        record(cell(strategy="fsdp2"), "oom", "rank 1: out of memory"),
        record(cell(), step_seconds=[0.25] * 6, inter_node_bytes_per_step=4.2e6),
    ]


def test_the_table_compares_with_zero3_on_the_same_model_and_link() -> None:
    lora = record(cell(tuning="lora", strategy="fsdp2"), losses=[math.nan])
    lines = rendered(summary([*comparison(), lora]))
    assert lines[:7] == [
        "strategy        state    speed  speed-up    sent      sent minimum   loss  step",
        "                      tokens/s vs ZeRO-3 MB/step vs ZeRO-3 MB/step            s",
        "",
        "llama-4x128 · full · 100 Mbit/s · emulated",
        "deepspeed-zero3 ok       1,024     1.00×    6.30     1.00×       – 5.3000 0.500",
        "fsdp2           oom          –         –       –         –       –      –     –",
        "fcdp            ok       2,048     2.00×    4.20     0.67×    6.00 5.3000 0.250",
    ]
    # No DeepSpeed beside it: nothing to compare with.
    assert lines[8:10] == [
        "llama-4x128 · lora · 100 Mbit/s · emulated",
        "fsdp2           ok       1,024         –    6.30         –    6.00    nan 0.500",
    ]
    assert lines[11:] == ["oom 1 cell: rank 1: out of memory", f"  {cell(strategy='fsdp2').id}"]


def test_other_settings_that_vary_are_in_the_heading_and_separate_groups() -> None:
    records = [
        record(cell(strategy=strategy, accumulation=accumulation, steps=steps))
        for strategy, steps in (("deepspeed-zero3", 3), ("fcdp", 5))
        for accumulation in (1, 4)
    ]
    lines = rendered(summary(records))
    headings = [line for line in lines if "·" in line]
    assert headings == [
        "llama-4x128 · full · 100 Mbit/s · accumulation 1 · emulated",
        "llama-4x128 · full · 100 Mbit/s · accumulation 4 · emulated",
    ]
    # Another number of steps is still the same comparison; equal times differ by nothing.
    speed_ups = [line.split()[3:5] for line in lines if line.startswith("fcdp")]
    assert speed_ups == [["not", "sig."]] * 2


def test_losses_are_of_one_step_and_of_held_out_data_where_there_are_some() -> None:
    held_out = record(cell(held_out=2), held_out_loss=5.25)
    without = record(cell(held_out=2, strategy="fsdp2"), "oom", "no memory")
    lines = rendered(summary([held_out, without]), 120)
    assert lines[0].split()[-3:] == ["held", "out", "step"]
    assert lines[4].split()[7:] == ["5.3000", "5.2500", "0.500"]
    assert lines[5].split()[7:] == ["–", "–", "–"]
    assert "held out" not in rendered(summary(comparison()))[0]
    # Losses in training are those of one step.
    slow = record(cell(strategy="deepspeed-zero3", steps=2), losses=[5.6, 5.5])
    quick = record(cell(steps=3), losses=[5.6, 5.5, 5.4])
    lines = rendered(summary([slow, quick]))
    assert "llama-4x128 · full · 100 Mbit/s · loss of step 2 · emulated" in lines
    assert [line.split()[-2] for line in lines[-2:]] == ["5.5000", "5.5000"]


def test_cells_that_ended_alike_are_listed_once() -> None:
    error = "rank 0: Traceback\n  File x\nRuntimeError: the cause"
    records = [record(cell(seed=seed), "failed", error) for seed in range(5)]
    records += [record(cell(seed=9), "skipped", "not interesting")]
    lines = rendered(summary(records))
    start = lines.index("failed 5 cells: RuntimeError: the cause")
    assert lines[start + 1 : start + 4] == [f"  {cell(seed=seed).id}" for seed in range(3)]
    assert lines[start + 4] == "  and 2 more"
    assert "skipped 1 cell: not interesting" in lines


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_has_fewer_columns_and_no_number_is_cut(width: int) -> None:
    matrix = reader.read("reference")
    sent = itertools.cycle([1.2e8, 1.160855e12])
    records = [record(cell, inter_node_bytes_per_step=next(sent)) for cell in matrix.cells]
    lines = rendered(summary(records), width)
    # A line a record, a heading and an empty line for each seven strategies, two lines of header.
    assert len(lines) == 2 + len(records) + 2 * len(records) // 7
    assert not any("…" in line or len(line) > width for line in lines)
    assert any("1,160,855" in line.split() for line in lines)
    assert ("minimum" in lines[0], "loss" in lines[0]) == (width > 80, width > 60)


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


def test_a_minimum_above_what_was_sent_has_a_note() -> None:
    less = record(
        cell(strategy="deepspeed-zero3"),
        engine="deepspeed",
        inter_node_bytes_closed_form=10e6,
        inter_node_bytes_per_step=9e6,
    )
    lines = rendered(summary([less]), width=120)
    assert "10.00*" in " ".join(lines)
    assert any(line.startswith("* the minimum is of a schedule that") for line in lines)
    more = record(cell(), inter_node_bytes_closed_form=9e6, inter_node_bytes_per_step=9e6)
    assert "*" not in " ".join(rendered(summary([more]), width=120))


def test_a_look_whether_a_file_can_be_written_writes_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "deep" / "new.json"
    old.write_text("{}")
    for file in (old, new):
        terminal.check_writable("--json", file)
    assert old.read_text() == "{}"
    assert set(tmp_path.rglob("*")) == {old, new.parent}
