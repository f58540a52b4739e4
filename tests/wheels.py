"""Builds the wheel of a copy of the checkout, and environments that have it."""

import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("packaging", reason="not in an environment made by `make setup`")
from packaging.requirements import Requirement

from tests import programs
from tests.programs import ROOT


def source(folder: Path, *packages: str) -> Path:
    """A copy of parts of the checkout, without leftovers of builds."""
    for name in packages:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(hook: str, source: Path, target: Path) -> Path:
    """Build a wheel by the backend's ``hook``, without pip and so without a network."""
    code = f"import sys, setuptools.build_meta as backend; backend.{hook}(sys.argv[1])"
    programs.printed(sys.executable, "-c", code, target, folder=source)
    (wheel,) = target.glob("*.whl")
    return wheel


def environment(wheel: Path, folder: Path, *packages: str) -> Path:
    """The Python of a new environment with the wheel, what it asks for, and ``packages``.

    Other packages than the wheel are those installed here.
    """
    made, shared = folder / "environment", folder / "shared"
    programs.printed(sys.executable, "-m", "venv", "--without-pip", made)
    python = made / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet"]
    programs.printed(*pip, "--no-deps", "--disable-pip-version-check", wheel)
    shared.mkdir()
    (site,) = made.glob("lib/*/site-packages")
    (described,) = site.glob(f"{wheel.name.split('-')[0]}-*.dist-info")
    for name in (*_needed(metadata.Distribution.at(described)), *packages):
        link(name, shared)
    (site / "shared.pth").write_text(f"{shared}\n")
    return python


def link(name: str, target: Path) -> None:
    """Link a package that is installed here, and all that it asks for, into ``target``."""
    queue, seen = [name], set[str]()
    while queue:
        package = metadata.distribution(queue.pop())
        if package.name in seen:
            continue
        seen.add(package.name)
        for root in {file.parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            if not (target / root).exists():  # several packages may share a folder
                (target / root).symlink_to(str(package.locate_file(root)))
        queue += _needed(package)


def _needed(package: metadata.Distribution) -> list[str]:
    """Names of the packages that one asks for here, without its extras."""
    needed = map(Requirement, package.requires or [])
    return [
        other.name
        for other in needed
        if other.marker is None or other.marker.evaluate({"extra": ""})
    ]
