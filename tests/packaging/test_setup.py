"""scripts/setup.sh empties no folder that it did not make; .ci/run tests the rest for real."""

import shutil
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.programs import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy what the script reads to a path with a space in it."""
    root = tmp_path / "check out"
    (root / "scripts").mkdir(parents=True)
    for name in ("constraints.txt", "constraints-paper.txt", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, root / name)
    return root


def refused(checkout: Path, **variables: str) -> str:
    """The message of a set-up that must fail; without an index pip could install nothing."""
    fixed = {"PYTHON": sys.executable, "TORCH": "cpu", "PIP_NO_INDEX": "1"}
    done = programs.ended(
        "bash", "scripts/setup.sh", folder=checkout, within_s=120, **(fixed | variables)
    )
    assert done.returncode == 1, done.stdout
    return done.stderr


def test_a_folder_that_is_no_virtual_environment_is_left_alone(checkout: Path) -> None:
    letter = checkout / "home" / "letter"
    letter.parent.mkdir()
    letter.write_text("dear")
    assert "not a virtual environment" in refused(checkout, VENV="home")
    assert letter.read_text() == "dear"


def test_an_environment_behind_a_link_is_left_alone(checkout: Path) -> None:
    """It may be that of another checkout, which ``venv --clear`` would empty."""
    other = checkout / "other"
    (other / "bin").mkdir(parents=True)
    (other / "pyvenv.cfg").touch()
    (checkout / ".venv").symlink_to(other)
    assert ".venv is a link" in refused(checkout, VENV=".venv")
    assert (other / "pyvenv.cfg").exists()


def test_an_unknown_build_of_torch_is_refused(checkout: Path) -> None:
    assert "TORCH is 'rocm'; it can be auto, cpu or cuda" in refused(checkout, TORCH="rocm")
    assert not (checkout / ".venv").exists()
