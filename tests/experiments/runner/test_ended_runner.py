"""The command that runs a matrix, killed and interrupted: it goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.matrix import reader
from experiments.records.provenance import ROOT
from experiments.records.record import read as read_records
from experiments.runner.directory import RunDirectory
from tests.experiments.stand_in import matrix_file
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
