"""Commands are imported when they are called, and the help of all of them says what each does."""

import sys

import pytest

from tests import programs
from tests.experiments.command_line import refused

pytestmark = pytest.mark.ranks


#: Prints the modules imported after help and mistakes, a plan, and all that runs a matrix.
LOOK = """
import sys, time
from typer.testing import CliRunner
from experiments.__main__ import app

for words in ([], ["--help"], ["plam"]):
    CliRunner().invoke(app, words)
print(*sys.modules)
result = CliRunner().invoke(app, sys.argv[1:])
print(result.exit_code, time.process_time() < 5, *sys.modules)
from experiments import tracking
from experiments.matrix import reader
from experiments.records import provenance
from experiments.runner import directory, runner
from experiments.terminal import progress
reader.read("quickstart")
provenance.gather()
print(*sys.modules)
"""


def test_a_command_is_imported_where_it_is_called_and_what_is_slow_by_ranks_alone() -> None:
    cluster = ["--nodes", "4", "--gpus", "8", "--gpu", "h100", "--inter-node", "25Gbps"]
    words = ("plan", "--model", "llama-3-70b", *cluster)
    lines = programs.printed(sys.executable, "-c", LOOK, *words).splitlines()
    helped, (code, in_time, *planned), ran = (line.split() for line in lines)
    assert not [name for name in helped if name.startswith(("experiments.commands.", "torch"))]
    assert (code, in_time) == ("0", "True")
    slow = {"torch", "deepspeed", "transformers", "peft", "pandas", "wandb", "matplotlib", "numpy"}
    assert not (slow | {"experiments.records.cell"}) & {*planned}
    assert not slow & {*ran}
    message = refused("plam")
    assert "No such command 'plam'" in message
    assert "plan" in message
