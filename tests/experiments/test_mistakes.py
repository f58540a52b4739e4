"""Mistakes at the command line: one line that says what is wrong, never a raw error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.commands import COMMANDS
from experiments.matrix.files import MATRICES
from experiments.records.provenance import ROOT
from tests.experiments.test_cli import command

_WORDS = re.compile(r"--[\w-]+|\w[\w./=-]*\w|\w")


@pytest.fixture(scope="module")
def somewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file and an empty folder in it."""
    folder = tmp_path_factory.mktemp("somewhere")
    (folder / "file").touch()
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "run volume --cluster simulated --output /proc/x",
            "--output = '/proc/x': records cannot be written there: nothing can be made there",
        ),
        (
            "run volume --cluster simulated --output HERE/file/x",
            "--output = 'HERE/file/x': records cannot be written there: HERE/file is a file, not a",
        ),
        ("trace volume --only fcdp-full --output /proc/x", "--output = '/proc/x': cannot be writ"),
        ("bound --output HERE/file", "--output = 'HERE/file/bound.jsonl': cannot be written: HERE"),
        ("validate HERE/empty", "RESULTS = 'HERE/empty': holds no records.jsonl that can be read"),
        (
            "plan --model gpt-30b --gpu a40 --preflight HERE/none",
            "HERE/none: no such file or direc",
        ),
        (
            "matrix new HERE/file/x.yaml",
            "FILE = 'HERE/file/x.yaml': cannot be written: HERE/file is",
        ),
        ("run quikstart", "MATRIX: unknown matrix 'quikstart'; allowed: ablation, "),
        ("run none/at/all.yaml", "MATRIX: there is no file none/at/all.yaml"),
        ("run quickstart --only zero9", "--only: no cell id matches 'zero9'; "),
        ("run paper/volume --cluster emulated", "--cluster emulated: the matrix is for "),
        ("run README.md", "MATRIX: README.md is no matrix, which is a file that ends in .yaml"),
        ("run HERE/empty", "MATRIX: the folder HERE/empty holds no file that ends in .yaml"),
        ("trace HERE/empty --only fcdp", "MATRIX: HERE/empty is a folder; give one of its files"),
    ],
)
def test_a_mistake_has_one_line(line: str, message: str, somewhere: Path) -> None:
    result = command(*line.replace("HERE", str(somewhere)).split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}".replace("HERE", str(somewhere)))
    assert len(result.stderr.splitlines()) == 1
    assert "Errno" not in result.stderr


def test_a_folder_of_own_matrices_runs_as_a_suite(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("volume", "quickstart"):
        shutil.copy(MATRICES / f"{name}.yaml", mine)
    result = command("run", str(mine), "--dry-run")
    assert result.exit_code == 0, result.stderr
    totals = [line for line in result.stdout.splitlines() if " cells to run, " in line]
    assert [line.partition(":")[0] for line in totals] == ["quickstart", "volume"]
    shutil.copy(MATRICES / "volume.yaml", mine / "copy.yaml")
    result = command("run", str(mine), "--dry-run")
    assert result.stderr.startswith("error: MATRIX: 2 of its matrices are named 'volume'; each")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_no_word_at_eighty_columns(name: str) -> None:
    """All words of its help and of its options are there as they are."""
    shown = command(name, "--help", COLUMNS="80").stdout
    assert "…" not in shown
    lines = [line.strip("│╭╮╰╯─ ") for line in shown.splitlines()]
    words = set(_WORDS.findall(" ".join(lines)))
    options = COMMANDS[name].load(name).params
    for option in options:
        wanted = _WORDS.findall(str(getattr(option, "help", None) or ""))
        assert set(wanted) <= words, (option.name, set(wanted) - words)


@pytest.mark.ranks
def test_a_simulated_run_says_so_and_sweeps_what_killed_ones_left(tmp_path: Path) -> None:
    scope = os.stat("/proc/self/ns/pid").st_ino
    left = tmp_path / f"fcdp-{scope}-{2**22 - 1}-1-0-x"
    left.mkdir()
    words = ("run", "volume", "--cluster", "simulated", "--only", "fsdp2-lora", "--no-wandb")
    result = subprocess.run(
        [sys.executable, "-m", "experiments", *words, "--output", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "1 cells · simulated cluster, 2 nodes × 2 ranks" in result.stdout
    assert "emulated" not in result.stdout
    assert not left.exists()
    assert str(ROOT) not in result.stdout
