"""Calls of ``python -m experiments`` in this process, and what a terminal shows."""

import io

from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from experiments.__main__ import app


def command(*arguments: object, **environment: str) -> Result:
    """Call the command line, as seen on a hundred columns."""
    return CliRunner(env={"COLUMNS": "100", **environment}).invoke(app, [*map(str, arguments)])


def flat(result: Result) -> str:
    """Text of both outputs without its line breaks."""
    return " ".join(result.output.split())


def printed(*arguments: object) -> str:
    """Output of a command that must succeed."""
    result = command(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    """Message of a command about a mistake, without line breaks."""
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    return flat(result)


def rendered(renderable: RenderableType, width: int = 100) -> list[str]:
    """The lines of a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]
