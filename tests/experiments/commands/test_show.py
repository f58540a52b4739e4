"""``show`` and ``compare`` read what runs leave, the committed ones included."""

from pathlib import Path

import pytest

from experiments.records.comparison import pooled
from experiments.records.record import read
from simulation import files
from tests.experiments.command_line import command, flat, printed, refused
from tests.experiments.stand_in import cell, record
from tests.programs import RESULTS


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for policy, seconds in (("none", [1.0, 1.1]), ("host", [0.5, 0.5]), ("disk", [1.05, 1.1])):
        made = record(cell(policy=policy), step_seconds=seconds)
        files.append(made, tmp_path / "mine" / "records.jsonl")
    return tmp_path / "mine"


#: Committed runs with settings and figures of their own.
RUNS = ("ablation", "cyclic-slots", "frozen", "fuyou", "luwu/two", "one-gpu", "post-training")


@pytest.mark.parametrize("name", RUNS)
def test_a_committed_run_is_shown_and_compared_with_itself(name: str) -> None:
    path = RESULTS / name
    shown = printed("show", path)
    ids = {each.cell_id for each in pooled(read(path / "records.jsonl"))}
    assert all(each in shown for each in ids)
    expected = f"0 of {len(ids)} cells differ beyond their intervals"
    assert expected in flat(command("compare", path, path))


@pytest.mark.parametrize(("policy", "ratio"), [("host", "0.476"), ("disk", "not significant")])
def test_two_cells_are_compared_in_full(run: Path, policy: str, ratio: str) -> None:
    lines = printed("compare", f"{run}:policy=none", f"{run}:policy={policy}").splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["policy"] == ["policy", "none", policy]
    assert " ".join(rows["s/step"][3:]) == ratio
    assert "accumulation" not in rows  # alike


def test_a_difference_between_runs_counts_beyond_the_spread(run: Path) -> None:
    again = run.parent / "again"
    for policy, seconds in (("none", [1.05, 1.1]), ("host", [0.25, 0.25])):
        files.append(record(cell(policy=policy), step_seconds=seconds), again / "records.jsonl")
    output = flat(command("compare", run, again))
    assert "1 of 2 cells differ beyond their intervals; 1 cells of the larger" in output
    assert "2.00×" in output


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_an_unreadable_run_hides_no_other(run: Path, tmp_path: Path, seconds: float) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "records.jsonl").write_text("{}\n", encoding="utf-8")
    shown = command("show", tmp_path)
    assert shown.exit_code == 0
    assert "broken/records.jsonl:1: not a record of this version" in flat(shown)
    assert [line.split()[0] for line in shown.output.splitlines()[-2:]] == ["broken", "mine"]
    # A step of no time is no record.
    made = record(cell(policy="auto"), step_seconds=[1.0]).model_dump_json()
    with (run / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write(made.replace('"step_seconds":[1.0]', f'"step_seconds":["{seconds}"]') + "\n")
    assert "measurement.step_seconds.0: Input should be" in refused("show", run)
