"""The commands of ``python -m experiments``: one module each, imported when the command is called.

Help of all commands needs their names and summaries alone; a summary is the first line of its
command's docstring (a test compares them).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

#: How all commands' help is written.
STYLE: Mapping[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}
_SHOWS_HELP: Mapping[str, Any] = {"no_args_is_help": True}


@dataclass(frozen=True)
class Command:
    """A command that is not imported yet: a function in a module here, both of its name."""

    summary: str
    #: As ``typer.Typer.command`` takes them.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def load(self, name: str) -> Any:
        """The command itself, with its options and its help."""
        own = name.replace("-", "_")
        function = getattr(importlib.import_module(f"{__name__}.{own}"), own)
        alone = typer.Typer(**STYLE)
        alone.command(name, **self.settings)(function)
        return get_command(alone)


#: In the order of the help.
COMMANDS: Mapping[str, Command] = {
    "run": Command(
        "Run a matrix: every cell in fresh processes, then table, figures, report and W&B runs.",
        _SHOWS_HELP,
    ),
    "matrix": Command(
        "Write a matrix file to begin with; `run FILE` runs it as it is.",
        _SHOWS_HELP,
    ),
    "show": Command(
        "List the runs below a directory; of one run, its cells and how they compare.",
    ),
    "compare": Command(
        "Compare two runs cell by cell, or two cells: settings, figures, beyond intervals or not.",
        _SHOWS_HELP,
    ),
    "watch": Command(
        "Follow a run in another terminal: a line per finished cell, and the step that it is at.",
        _SHOWS_HELP,
    ),
    "strategies": Command(
        "List the strategies: engine, versions, and why one cannot run on this machine.",
    ),
    "plan": Command(
        "Say which strategies fit a cluster, how fast each is, what it costs, and which to take.",
        _SHOWS_HELP,
    ),
    "preflight": Command(
        "Measure a cluster's links, copies and compute, for the planner and the simulator.",
    ),
    "memory": Command(
        "Find the largest micro-batch of the paper's models, by strategy, without a GPU.",
    ),
    "fit-compute": Command(
        "Fit the planner's rates of computation to published measurements, or check them on "
        "others.",
    ),
    "bound": Command(
        "Bound FSDP's utilisation by free memory × bandwidth / peak rate, "
        "for 1.3B to 310B on A100s.",
    ),
    "validate": Command(
        "Compare the simulator's steps with those that were run: time, and bytes between nodes.",
    ),
    "trace": Command(
        "Simulate one cell of a matrix and write its step for chrome://tracing or ui.perfetto.dev.",
        _SHOWS_HELP,
    ),
    "sweep-cell": Command(
        "Run one cell of a matrix for a W&B sweep, as `run MATRIX --resume` would, "
        "and write its run.",
        {"context_settings": {"ignore_unknown_options": True}},
    ),
}


class Lazy(TyperGroup):
    """A group whose members stand in for ``COMMANDS`` until one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, imported; raises as typer does for an unknown one."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else COMMANDS[name].load(name), rest


def stand_in() -> None:
    """Is listed in the help in place of a command."""
    raise AssertionError("a command is imported before it is called")
