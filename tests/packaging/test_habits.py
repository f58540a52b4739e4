"""What contributors read and run: CONTRIBUTING.md, the changelog, hooks, the workflow."""

from __future__ import annotations

import importlib
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import programs, tiers
from tests.programs import ROOT, make

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXTEND = (ROOT / "docs/extend.md").read_text(encoding="utf-8").replace("](../", "](")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
#: A file or folder of this repository, in code or as a link.
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`")


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


def test_hooks_run_what_make_lint_runs() -> None:
    (local,) = of_yaml(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert all(hook["language"] == "system" for hook in local["hooks"])
    shown = make("-n", "lint", "VENV=.venv").stdout.splitlines()
    assert [hook["entry"] for hook in local["hooks"]] == [line for line in shown if "bin/" in line]


def test_the_hooks_are_as_pre_commit_wants_them() -> None:
    pre_commit = Path(sys.executable).with_name("pre-commit")
    if not pre_commit.exists():
        pytest.skip("pre-commit is not in this environment: `make setup` did not make it")
    programs.printed(pre_commit, "validate-config", ".pre-commit-config.yaml")


def test_the_workflow_calls_the_command_of_ci() -> None:
    workflow = of_yaml(".github/workflows/ci.yml")
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads the key `on` as true
    (job,) = workflow["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[-1].split()[-1] == ".ci/run"
    assert workflow["permissions"] == {"contents": "read"}
