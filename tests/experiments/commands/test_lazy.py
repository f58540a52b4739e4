"""Commands are imported when they are called, and the help of all of them says what each does."""

from __future__ import annotations

import sys

import pytest

from tests import programs
from tests.experiments.command_line import refused

pytestmark = pytest.mark.ranks


def test_an_unknown_command_is_a_mistake() -> None:
    said = refused("plam")
    assert "No such command 'plam'" in said
    assert "plan" in said


def test_help_and_mistakes_import_no_command() -> None:
    look = "import sys; from typer.testing import CliRunner; from experiments.__main__ import app; "
    look += "[CliRunner().invoke(app, words) for words in ([], ['--help'], ['plam'])]; "
    look += "print([m for m in sys.modules if m.startswith(('experiments.commands.', 'torch'))])"
    assert programs.printed(sys.executable, "-c", look) == "[]\n"


def test_the_default_plan_waits_for_no_slow_import_and_takes_not_long() -> None:
    look = (
        "import sys, time; from typer.testing import CliRunner; "
        "from experiments.__main__ import app; "
        "found = CliRunner().invoke(app, sys.argv[1:]); "
        "print(found.exit_code, time.process_time() < 5, *sys.modules)"
    )
    cluster = ["--nodes", "64", "--gpus", "8", "--gpu", "a40", "--inter-node", "10Gbps"]
    words = ("plan", "--model", "gpt-30b", *cluster)
    code, in_time, *imported = programs.printed(sys.executable, "-c", look, *words).split()
    assert (code, in_time) == ("0", "True")
    late = {"torch", "numpy", "pandas", "matplotlib", "transformers", "experiments.records.cell"}
    assert not late & {*imported}
