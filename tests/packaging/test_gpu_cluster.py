"""The command for a borrowed GPU, rehearsed on CPUs: its cells, its end, its table and picture."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.matrix import reader
from experiments.records.comparison import FEWEST
from experiments.records.record import Record, read
from tests import programs
from tests.programs import ROOT

#: One cell of each strategy: what runs first.
CELLS = "tuning=full,k=1,link=5Gbps"


def gpu_cluster(output: Path, lasts: float) -> subprocess.CompletedProcess[str]:
    given = {"PYTHON": sys.executable, "OUTPUT": output, "LASTS": lasts, "CELLS": CELLS}
    return programs.make("-s", "gpu-cluster", *(f"{name}={of}" for name, of in given.items()))


def drawn(output: Path) -> set[str]:
    return {file.suffix for file in (output / "report").rglob("*") if file.is_file()}


@pytest.mark.usefixtures("privileged")
def test_each_strategy_runs_and_what_has_run_when_the_time_is_over_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = gpu_cluster(output, lasts=500)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read(output / "records.jsonl")
    ran = [record for record in records if record.state != "skipped"]
    assert {record.state for record in ran} == {"ok"}
    assert {record.cell.subject for record in ran} == first_row()
    assert {".md", ".svg", ".html"} <= drawn(output)
    assert all(sent(record) > 0 for record in ran)
    shutil.rmtree(output / "report")
    over = gpu_cluster(output, lasts=0.2)
    assert over.returncode == 0, over.stdout + over.stderr
    assert read(output / "records.jsonl") == records
    assert {".md", ".svg", ".html"} <= drawn(output)


def test_where_nothing_has_run_the_command_fails(tmp_path: Path) -> None:
    over = gpu_cluster(tmp_path, lasts=0.2)
    assert over.returncode
    assert "holds no records" in over.stderr


def test_the_tree_is_small_enough_to_travel() -> None:
    """With `make wheels` beside it, 5 MiB, it is at most 60 MiB."""
    names = programs.printed("git", "ls-files", "-z").split("\0")[:-1]
    there = [file for file in map(ROOT.joinpath, names) if file.is_file()]
    assert sum(file.stat().st_size for file in there) <= 55 * 2**20


def first_row() -> set[str]:
    """The cells that run first compare each strategy of the matrix, and differences."""
    running = reader.read("one-gpu-cluster").running
    strategies = {cell.strategy for cell in running}
    first = running[: len(strategies) + 1]
    assert {cell.strategy for cell in first} == strategies
    assert len({(cell.tuning, cell.links, cell.accumulation) for cell in first}) == 1
    return {cell.subject for cell in first}


def sent(record: Record) -> float:
    assert record.measurement is not None
    assert len(record.measurement.step_seconds) >= FEWEST
    return record.measurement.inter_node_bytes_per_step
