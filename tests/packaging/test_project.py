"""Make targets, the CI command, shell scripts, and the files that a reader looks for first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import programs
from tests.programs import ROOT, make

TARGETS = (
    *("quickstart", "reproduce", "check", "test", "ci", "lint", "docs", "archive", "mutants"),
    *("gpu", "setup", "baselines", "clients", "pins", "clean", "help"),
)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_can_be_shown_without_running_it(target: str) -> None:
    done = make("-n", target)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["quickstart", "check", "test", "ci", "lint", "docs"])
def test_targets_that_need_the_environment_make_it_first(target: str) -> None:
    done = make("-n", target)
    assert "scripts/setup.sh" in done.stdout.splitlines()[0]


def test_a_gpu_needs_no_environment_but_the_python_that_is_given() -> None:
    assert "scripts/setup.sh" in make("-n", "gpu").stdout.splitlines()[0]
    given = make("-n", "gpu", "PYTHON=python3.12").stdout
    assert "setup.sh" not in given
    assert "\npython3.12 -m pytest -v -m gpu " in given


def test_an_archive_has_all_tracked_files_with_their_checksums(tmp_path: Path) -> None:
    """Whose own checksum, of one commit, is the same each time."""
    first, again = make("-s", "archive"), make("-s", "archive")
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    archive = ROOT / first.stdout.split()[1]
    programs.printed("tar", "-xzf", archive, "-C", tmp_path)
    checked = ("sha256sum", "--strict", "-c", "SHA256SUMS")
    lines = programs.printed(*checked, folder=tmp_path / "fcdp").splitlines()
    tracked = programs.printed("git", "ls-tree", "-r", "--name-only", "-z", "HEAD")
    named = {line.rpartition(": ")[0].removeprefix("./") for line in lines}
    assert named == {name for name in tracked.split("\0") if name}
    archive.unlink()


def test_make_alone_lists_the_targets() -> None:
    done = make()
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TARGETS)


@pytest.mark.parametrize(
    ("recipe", "status", "last_line"),
    [
        ("@echo 3 passed, 1 skipped in 0.12s", 0, "3 passed, 1 skipped in 0.12s"),
        ("@echo 3 passed in 0.12s\nmutants:\n\t@exit 1", 2, "3 passed in 0.12s"),
        ("@echo '1 failed, 2 passed in 61.20s (0:01:01)'; exit 1", 2, "1 failed, 2 passed in 61.2"),
        ("@echo 2 errors in 1.00s; exit 1", 2, "2 errors in 1.00s"),
        ("@echo ruff is not content; exit 1", 2, "ruff is not content"),
    ],
)
def test_ci_fails_with_the_tests_and_ends_with_their_closing_line(
    tmp_path: Path, recipe: str, status: int, last_line: str
) -> None:
    done = ci(tmp_path, recipe, docs="@echo built")
    assert done.returncode == status
    lines = [line for line in done.stdout.splitlines() if not line.startswith("make")]
    assert lines[-1].startswith(last_line)


def test_ci_fails_without_the_documentation_and_runs_the_tests_all_the_same(tmp_path: Path) -> None:
    done = ci(tmp_path, "@echo 3 passed in 0.12s", docs="@echo WARNING: no such page; exit 1")
    assert done.returncode == 1
    assert "make docs" in done.stderr
    assert done.stdout.splitlines()[-1] == "3 passed in 0.12s"


def ci(root: Path, tests: str, docs: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run where these are the recipes of ``make ci`` and ``make docs``."""
    (root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", root / ".ci/run")
    mutants = "" if "mutants:" in tests else "mutants:\n\t@echo survived: none\n"
    (root / "Makefile").write_text(f"ci:\n\t{tests}\n\ndocs:\n\t{docs}\n{mutants}")
    return programs.ended(root / ".ci/run", folder=Path("/"))


def test_licence_and_citation() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == "Apache-2.0"
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()
    (paper,) = citation["references"]
    assert paper["url"] == "https://arxiv.org/abs/2602.06499"


SCRIPTS = [
    *(path for path in sorted((ROOT / "launch").iterdir()) if path.suffix != ".yaml"),
    *sorted((ROOT / "scripts").glob("*.sh")),
    ROOT / ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_linter_has_no_complaint(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    # Below a warning it asks about functions that are called by name.
    programs.printed(shellcheck, "--severity=warning", script)
