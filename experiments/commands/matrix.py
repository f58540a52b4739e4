"""``python -m experiments matrix``: begin a matrix file of one's own."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from experiments import terminal
from experiments.matrix import reader

#: Text of a new file, but for its name.
_TEMPLATE = Path(__file__).with_name("new.yaml")


def matrix(
    action: Annotated[Literal["new"], typer.Argument(help="new: write a file to begin with.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where it goes: NAME.yaml.")],
) -> None:
    """Write a matrix file to begin with; `run FILE` runs it as it is.

    Exit status: 0; 2 if it cannot be written, or if there is such a file already.
    """
    assert action == "new", "the one action"
    if file.suffix not in (".yaml", ".yml"):
        terminal.stop(f"FILE = {str(file)!r}: ends in neither .yaml nor .yml")
    with terminal.stopping():
        if file.exists() or file.is_symlink():
            raise ValueError(f"FILE = {str(file)!r}: is there already, and stays as it is")
        terminal.check_writable("FILE", file)
        with file.open("x", encoding="utf-8") as new:
            new.write(_TEMPLATE.read_text(encoding="utf-8").replace("NAME", file.stem))
    try:
        expanded = reader.read(str(file.absolute()))
    except ValueError as error:  # a name that no matrix may have
        file.unlink()
        terminal.stop(f"FILE = {str(file)!r}: {error}")
    terminal.say("matrix", file)
    hint = f"{len(expanded.cells)} cells; try: python -m experiments run {file} --dry-run"
    terminal.console().print(hint)
