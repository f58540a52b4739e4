"""The place of DeepSpeed's other pin, and the variables with which a process imports it."""

import os
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from baselines import pins


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up one beside a made-up environment of this process; returns its packages."""
    packages = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / ".venv" / packages))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    described = tmp_path / ".venv-paper" / packages / "deepspeed-0.16.2.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.2\n")
    return described.parent


def test_an_installation_that_was_cut_short_is_none(environment: Path, tmp_path: Path) -> None:
    assert pins.version("paper") is None
    (tmp_path / ".venv-paper/setup.stamp").touch()
    assert pins.version("paper") == "0.16.2"


def test_the_usual_pin_is_this_environments() -> None:
    assert pins.version("current") == metadata.version("deepspeed")
    assert pins.variables("current") == {}


def test_a_process_with_its_variables_imports_it_first(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    variables = pins.variables("paper")
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(environment), "/somewhere/else"]
    # Operators of one version are not the other's.
    assert Path(variables["TORCH_EXTENSIONS_DIR"]).is_relative_to(f"{sys.prefix}-paper")
