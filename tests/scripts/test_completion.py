"""TAB after `python -m experiments`, in a real bash."""

import shlex
import sys

import pytest

from experiments.commands import COMMANDS
from tests import programs

pytestmark = pytest.mark.ranks


def completed(line: str) -> list[str]:
    """Completions that bash offers for the last word of a line."""
    words = [*line.split()] + ([""] if line.endswith(" ") else [])
    words[0] = sys.executable
    script = (
        f". scripts/completion.bash; COMP_WORDS=({' '.join(map(shlex.quote, words))}); "
        f'COMP_CWORD={len(words) - 1}; _fcdp_complete; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    return programs.printed("bash", "-euc", script).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("python -m experiments ru", {"run"}),
        ("python -m experiments run --dry", {"--dry-run"}),
        ("python -m analysis timel", {"timeline"}),
        ("python -m analysis table --mark", {"--markdown"}),
        ("python -m experiments ", set(COMMANDS)),
    ],
)
def test_commands_and_options_are_offered(line: str, offered: set[str]) -> None:
    assert set(completed(line)) == offered


@pytest.mark.parametrize("line", ["python -m json", "python -m json.tool ", "python setup.py ru"])
def test_nothing_is_offered_for_other_programs(line: str) -> None:
    assert completed(line) == []
