"""The commands of ``python -m experiments``: one module each, imported when the command is called.

Help of all commands needs their names and summaries alone.
"""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

#: Style of all commands' help.
STYLE: Mapping[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}
_SHOWS_HELP: Mapping[str, Any] = {"no_args_is_help": True}
#: As ``typer.Typer.command`` takes them, in the order of the help.
COMMANDS: Mapping[str, Mapping[str, Any]] = {
    "run": _SHOWS_HELP,
    "matrix": _SHOWS_HELP,
    "show": {},
    "compare": _SHOWS_HELP,
    "strategies": {},
    "plan": _SHOWS_HELP,
    "preflight": {},
    "memory": {},
    "fit-compute": {},
    "bound": {},
    "validate": {},
    "trace": _SHOWS_HELP,
}


def summary(name: str) -> str:
    """Return the first line of a command's docstring without importing the command."""
    module = name.replace("-", "_")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    match = re.search(rf'^def {module}\(.*?"""([^\n]*)', source, re.DOTALL | re.MULTILINE)
    assert match is not None, "a command is a function of its module's name, and says what it does"
    return match[1]


def load(name: str) -> Any:
    module = name.replace("-", "_")
    function = getattr(importlib.import_module(f"{__name__}.{module}"), module)
    alone = typer.Typer(**STYLE)
    alone.command(name, **COMMANDS[name])(function)
    return get_command(alone)


class Lazy(TyperGroup):
    """A group whose members stand in for ``COMMANDS`` until one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, imported; raises as typer does for an unknown one."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def stand_in() -> None:
    """Take a command's place, so that ``--help`` need not import it."""
    raise AssertionError("a command is imported before it is called")
