"""The README: short, its tables the records', its links, code and commands real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_group

import analysis.__main__
import experiments.__main__
from experiments.matrix.files import find, suites

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

PROGRAMS = {
    "experiments": get_group(experiments.__main__.app),
    "analysis": get_group(analysis.__main__.app),
}


@pytest.mark.ranks
def test_the_tables_are_those_of_the_records() -> None:
    """Those of the README, and of the pages that have some."""
    check = subprocess.run(
        [sys.executable, "-m", "scripts.readme", "--check"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_every_link_into_the_repository_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    inside = [link for link in links if "://" not in link]
    inside += re.findall(r'src(?:set)?="([^"]+)"', README)
    assert len(inside) > 5
    assert [link for link in inside if not (ROOT / link).exists()] == []


def test_the_api_is_five_lines() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(block, "README.md", "exec")
    assert len(block.splitlines()) == 5


def commands() -> list[list[str]]:
    """Words of each command that the README shows, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    lines = "".join(block for language, block in blocks if not language).splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def named(words: list[str]) -> bool:
    """Whether what a command calls is there."""
    match words:
        case ["make", target]:
            return f"\n{target}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        case ["python", "-m", "experiments", "run", name, *_]:
            return matrix(name)
        case ["python", "-m", program, command, *_]:
            return command in PROGRAMS[program].commands
        case ["docker", "build", *_]:
            return (ROOT / "Dockerfile").exists()
        case ["cp", source, _] | [source, *_]:
            return (ROOT / source).is_file()
    return False


def matrix(name: str) -> bool:
    made = {words[-1] for words in commands() if words[0] == "cp"}
    return name in made or name in suites() or find(name).is_file()


def test_the_readme_has_the_commands_of_three_jobs() -> None:
    assert len(commands()) > 12


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_calls_what_there_is(words: list[str]) -> None:
    assert named(words)
