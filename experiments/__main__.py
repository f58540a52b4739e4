"""``python -m experiments``: run matrices of cells on clusters; plan, measure, predict."""

from __future__ import annotations

import typer

from experiments import commands
from experiments.bound.command import bound
from experiments.planner.command import plan
from experiments.preflight.command import preflight
from experiments.trace import trace
from experiments.validate import validate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(no_args_is_help=True)(commands.run)
app.command()(commands.strategies)
app.command(no_args_is_help=True)(plan)
app.command()(preflight)
app.command()(commands.memory)
app.command()(bound)
app.command()(validate)
app.command(no_args_is_help=True)(trace)
app.command(context_settings={"ignore_unknown_options": True})(commands.sweep_cell)


@app.callback()
def main() -> None:
    """FCDP next to other ZeRO-3 strategies: matrices of cells on a cluster, and their records."""


if __name__ == "__main__":
    app()
