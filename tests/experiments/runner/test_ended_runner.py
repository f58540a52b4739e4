"""The command that runs a matrix, killed and interrupted: it goes on where it was."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.record import read as read_records
from experiments.runner.directory import RunDirectory
from tests.experiments.stand_in import cell, matrix_file, record
from tests.experiments.waiting import wait_until


def start(file: Path, output: Path, *options: str, **cluster: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.experiments.stand_in", "run", str(file)),
            *("--output", str(output), "--no-wandb", *options),
        ],
        cwd=ROOT,
        env={**os.environ, "STAND_IN": json.dumps(cluster)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_records(file: Path, count: int) -> None:
    wait_until(lambda: file.exists() and file.read_bytes().count(b"\n") >= count)


@pytest.mark.ranks
def test_a_directory_is_a_living_runners_alone(tmp_path: Path) -> None:
    """A killed runner's lock does not count.

    Nor do signals reach a helper that a network library forks, which would unwind into the
    cluster's teardown, in the wrong process.
    """
    file, directory = matrix_file(tmp_path), RunDirectory(tmp_path / "run")
    process = start(file, directory.path, behaviours={"fcdp-full-tiny-10mbit": "hang"})
    wait_for_records(directory.records, 5)
    second = start(file, directory.path, "--resume")
    _, error = second.communicate(timeout=100)
    assert second.returncode == 2
    assert f"another run (process {process.pid}) uses this directory" in error
    process.kill()
    process.communicate()
    process = start(file, directory.path, "--resume", behaviours={"": "helper"})
    output, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert "5 cells are finished already" in output
    ids = [cell.id for cell in reader.read(str(file)).cells]
    assert [r.cell_id for r in read_records(directory.records)] == ids


@pytest.mark.system
def test_killed_anywhere_and_resumed_it_has_the_records_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    """kill -9 at moments spread over the whole command, start and end included."""
    file = matrix_file(tmp_path, steps=1)
    undisturbed, disturbed = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "other")
    cluster = {"step_seconds": 0.05, "behaviours": {"fcdp-full-tiny-10mbit": "raise"}}
    began = time.monotonic()
    start(file, undisturbed.path, **cluster).communicate()
    whole = time.monotonic() - began
    chance = random.Random(0)
    for _ in range(4):
        # Now and then from the beginning, which puts what there is aside.
        options = ["--resume"] if chance.random() < 0.8 else []
        process = start(file, disturbed.path, *options, **cluster)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=chance.uniform(0, whole))
        process.kill()
        process.communicate()
        _tear(disturbed.records, chance.randrange(3))
    process = start(file, disturbed.path, "--resume", **cluster)
    process.communicate()
    assert _without_times(disturbed.records) == _without_times(undisturbed.records)
    assert process.returncode == 1  # for the cell that fails


def _tear(file: Path, how: int) -> None:
    """Append what a kill may leave of a line being written: nothing, a part, or no newline."""
    if not file.exists() or how == 0:
        return
    line = record(cell(seed=7)).model_dump_json()
    with file.open("a") as text:
        text.write(line[: len(line) // 2] if how == 1 else line)


def _without_times(file: Path) -> list[dict[str, Any]]:
    """The records, without their times and the load of their machine."""
    when = {"started_at", "seconds", "machine"}
    return [record.model_dump(exclude=when) for record in read_records(file)]


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path, number: int) -> None:
    file, directory = matrix_file(tmp_path), RunDirectory(tmp_path / "run")
    process = start(file, directory.path, behaviours={"fsdp2-full-tiny-10mbit": "hang"})
    wait_for_records(directory.records, 4)
    process.send_signal(number)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "interrupted" in error
    assert "--resume" in error
    assert "Traceback" not in error
    assert len(read_records(directory.records)) == 4
