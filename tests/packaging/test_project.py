"""Files that contributors use: CI, hooks, scripts, CONTRIBUTING, the changelog."""

import importlib
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import programs, tiers
from tests.packaging.test_pins import PYTHONS
from tests.programs import ROOT, make

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXTEND = (ROOT / "docs/extend.md").read_text(encoding="utf-8").replace("](../", "](")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
#: A file or folder of this repository, in code or as a link.
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")


def test_an_archive_has_all_tracked_files_with_their_checksums(tmp_path: Path) -> None:
    """The archive's own checksum, of one commit, is the same each time."""
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


@pytest.mark.parametrize(("installs", "passes"), [(True, True), (True, False), (False, True)])
def test_ci_runs_the_newest_torch_too_or_goes_on_without_it(
    tmp_path: Path, installs: bool, passes: bool
) -> None:
    newest = f"#!/bin/bash\necho $* with the newest; exit {int(not passes)}\n"
    made = f"#!/bin/bash\n[[ $* == '--torch 2.15.0' ]] && exit {int(not installs)}\n"
    for folder in (".venv-2.15.0/bin", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    programs.written(tmp_path / ".venv-2.15.0/bin/python", newest)
    programs.written(tmp_path / "scripts/setup.sh", made)
    shutil.copy(ROOT / "constraints-newest.txt", tmp_path)
    slow = "@echo 3 passed in 0.12s\nmutants:\n\t@sleep 1; echo survived: none"
    done = ci(tmp_path, slow, docs="@echo built")
    assert done.returncode == (0 if passes else 1)
    before, ran, _ = done.stdout.partition("-m scripts.versions 2.15.0 --short with the newest")
    assert bool(ran) == installs
    assert "survived: none" in before
    assert ("going on without torch 2.15.0" in done.stderr) == (not installs)
    assert done.stdout.splitlines()[-1] == "3 passed in 0.12s"
    assert not (tmp_path / ".venv-2.15.0").exists()


def ci(root: Path, tests: str, docs: str) -> subprocess.CompletedProcess[str]:
    """Run .ci/run with these recipes of ``make ci`` and ``make docs``."""
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
    assert f"## [{citation['version']}] – {citation['date-released']}\n" in CHANGELOG
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


def of_yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", [CONTRIBUTING, CHANGELOG], ids=["CONTRIBUTING", "CHANGELOG"])
def test_paths_lead_somewhere(text: str) -> None:
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []


def test_names_stand_in_the_file_that_is_linked_beside_them() -> None:
    """``_POLICIES`` of [file](file), and its like."""
    named = re.findall(r"`(\w+)`(?: of| in)\s+\[[^]]*\]\(([^)#]+\.py)\)", CONTRIBUTING + EXTEND)
    assert {"place", "_POLICIES", "STRATEGIES", "Schedule", "Cell", "draw"} <= {*dict(named)}
    for name, path in named:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (name, path)


def test_dotted_names_are_there() -> None:
    named = re.findall(
        r"`((?:fcdp|baselines|simulation|experiments|analysis)\.[\w.]+)`", CONTRIBUTING + EXTEND
    )
    assert named
    for module, _, name in (dotted.rpartition(".") for dotted in named):
        assert hasattr(importlib.import_module(module), name), (module, name)


def test_the_tiers_are_those_of_the_tests() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* pytest -m (\w+)` \|$", CONTRIBUTING, re.MULTILINE)
    assert rows == [(tier, tier) for tier in tiers.TIERS]


def test_the_changelog_ends_its_unreleased_part_with_the_version_before() -> None:
    versions = re.findall(r"^## \[(.+?)\](?: – (\S+))?$", CHANGELOG, re.MULTILINE)
    assert versions[0] == ("Unreleased", "")
    (current,) = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert versions[1][0] == current
    dates = [date.fromisoformat(day) for _, day in versions[1:]]
    assert dates == sorted(dates, reverse=True)
    kinds = set(re.findall(r"^### (.+)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_each_change_is_one_sentence() -> None:
    entries = re.findall(r"^- (.*(?:\n  .*)*)", CHANGELOG, re.MULTILINE)
    assert entries
    assert [each for each in entries if len(re.findall(r"[.!?](?=\s+[^a-z]|$)", each)) != 1] == []


def test_the_hooks_are_as_pre_commit_wants_them() -> None:
    pre_commit = Path(sys.executable).with_name("pre-commit")
    if not pre_commit.exists():
        pytest.skip("pre-commit is not in this environment: `make setup` did not make it")
    programs.printed(pre_commit, "validate-config", ".pre-commit-config.yaml")


def test_the_workflow_runs_ci_and_each_tier_on_each_python() -> None:
    workflow = of_yaml(".github/workflows/ci.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["whole"]["steps"][-1]["run"].split()[-1] == ".ci/run"
    matrix = workflow["jobs"]["part"]["strategy"]["matrix"]
    # The tier system takes daemons and whole cells: .ci/run alone has it.
    assert {*matrix["part"]} == {"lint", "clients", *tiers.TIERS} - {"system"}
    assert [each["part"] for each in matrix["include"]] == matrix["part"]
    assert matrix["python"] == [python.rpartition(".")[0] for python in PYTHONS]
