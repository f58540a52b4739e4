"""Calls of ``python -m experiments`` in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from experiments.__main__ import app


def command(*arguments: object, **environment: str) -> Result:
    """Call the command line, as seen on a hundred columns."""
    return CliRunner(env={"COLUMNS": "100", **environment}).invoke(app, [*map(str, arguments)])


def flat(result: Result) -> str:
    """Text of both outputs without its line breaks."""
    return " ".join(result.output.split())
