"""Commands are imported when they are called, and the help of all of them says what each does."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.commands import COMMANDS, load, summary
from tests import programs

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_is_the_first_line_of_its_command(name: str) -> None:
    assert load(name).help.splitlines()[0] == summary(name)


def test_an_unknown_command_is_a_mistake() -> None:
    result = CliRunner().invoke(app, ["plam"])
    assert result.exit_code == 2
    assert "No such command 'plam'" in result.output
    assert "plan" in result.output


def test_help_and_mistakes_import_no_command() -> None:
    look = "import sys; from typer.testing import CliRunner; from experiments.__main__ import app; "
    look += "CliRunner().invoke(app, [{}]); "
    look += "print([m for m in sys.modules if m.startswith(('experiments.commands.', 'torch'))])"
    for arguments in ("", "'--help'", "'plam'"):
        assert programs.printed(sys.executable, "-c", look.format(arguments)) == "[]\n"


def test_the_default_plan_waits_neither_for_torch_nor_for_long() -> None:
    look = (
        "import sys, time; from typer.testing import CliRunner; "
        "from experiments.__main__ import app; "
        "found = CliRunner().invoke(app, sys.argv[1:]); "
        "print(found.exit_code, 'torch' in sys.modules, time.process_time() < 5)"
    )
    cluster = ["--nodes", "64", "--gpus", "8", "--gpu", "a40", "--inter-node", "10Gbps"]
    words = ("plan", "--model", "gpt-30b", *cluster)
    assert programs.printed(sys.executable, "-c", look, *words) == "0 False True\n"
