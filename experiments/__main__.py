"""``python -m experiments``: run matrices of cells on clusters; plan, measure, predict."""

from typing import Annotated

import typer
from typer._completion_classes import completion_init

from experiments.commands import COMMANDS, STYLE, Lazy, stand_in, summary

completion_init()  # for scripts/completion.bash
app = typer.Typer(cls=Lazy, no_args_is_help=True, **STYLE)
for _name in COMMANDS:
    app.command(_name, help=summary(_name))(stand_in)


def _say_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"fcdp {version('fcdp')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def main(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the versions."),
    ] = False,
) -> None:
    """FCDP next to other ZeRO-3 strategies: matrices of cells on a cluster, and their records."""


if __name__ == "__main__":
    app()
