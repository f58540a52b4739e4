"""Builds the wheel of a copy of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def source(folder: Path, *packages: str) -> Path:
    """A copy of the checkout, in which no build has left anything."""
    for name in packages:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(hook: str, source: Path, target: Path) -> Path:
    """What the build backend's ``hook`` makes, without pip and so without a network."""
    code = f"import sys, setuptools.build_meta as backend; backend.{hook}(sys.argv[1])"
    command = [sys.executable, "-c", code, target]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = target.glob("*.whl")
    return found
