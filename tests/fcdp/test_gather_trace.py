"""The way of one gather through the library: which files it enters, and in which direction."""

import subprocess
import sys

import pytest

from scripts import gather_trace
from scripts.gather_trace import ORDER, PAGE, ROOT

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="functions have no qualified names before Python 3.11"
)


@pytest.mark.ranks
def test_a_gather_is_the_committed_one() -> None:
    """In a process of its own, as it makes a process group."""
    command = [sys.executable, "-m", "scripts.gather_trace"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    hint = "python -m scripts.gather_trace --write"
    assert run.stdout == PAGE.read_text(encoding="utf-8") + "\n", hint


@pytest.mark.parametrize("name", ["device, miss", "device, hit", "host, miss", "host, hit"])
def test_a_gather_enters_ten_files_and_calls_nothing_above_it(name: str) -> None:
    calls = committed()[name]
    assert {file for _, file, _ in calls} <= {*ORDER}
    assert len(ORDER) <= 10
    stack: list[str] = []
    for depth, file, function in calls:
        del stack[depth:]
        if stack:
            assert ORDER.index(stack[-1]) <= ORDER.index(file), f"{stack[-1]} calls {function}"
        stack.append(file)


def committed() -> dict[str, list[gather_trace.Call]]:
    """Read the committed trace."""
    read: dict[str, list[gather_trace.Call]] = {}
    name = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines()[1:]:
        if line and not line.startswith(" "):
            name = line.split(":")[0]
            read[name] = []
        elif line:
            file, function = line.strip().split(": ")
            read[name].append(((len(line) - len(line.lstrip())) // 2 - 1, file, function))
    return read
