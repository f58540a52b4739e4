"""Output of all commands, how they stop, and how they are interrupted."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

#: Exit status: some cells failed; the user or the machine has to change something; a node is lost,
#: and the same command may go on without a change (``EX_TEMPFAIL`` of sysexits.h).
FAILED = 1
UNUSABLE = 2
LOST = 75
#: Exit status of a command that was interrupted.
INTERRUPTED = 130


def console() -> Console:
    """Rich's console on standard output; wide where it is a log, which has no width of its own."""
    return Console() if sys.stdout.isatty() else Console(width=120, force_interactive=False)


def say(what: str, path: Path) -> None:
    say_as_it_is(f"{what:<8} {shown(path)}")


def say_as_it_is(text: str, style: str = "") -> None:
    """Print a line as it is: not wrapped, not highlighted, not read as markup."""
    console().print(text, style=style, soft_wrap=True, highlight=False, markup=False)


def table(words: Sequence[str], numbers: Sequence[str] = (), **look: Any) -> Table:
    """Rich's table without a box, with these columns; those of numbers are aligned right."""
    made = Table(*words, box=None, **look)
    for title in numbers:
        made.add_column(title, justify="right")
    return made


def shown(path: Path) -> str:
    """The path as seen from here, if it is below."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def say_error(message: str) -> None:
    typer.secho(message, fg="red", err=True)


def stop(problem: str | Exception, status: int = UNUSABLE) -> NoReturn:
    """End the command, with exit status 2: it cannot start or go on."""
    if isinstance(problem, OSError) and problem.filename is not None and problem.strerror:
        problem = f"{problem.filename}: {problem.strerror.lower()}"
    say_error(f"error: {problem}")
    raise typer.Exit(status)


@contextmanager
def stopping(*errors: type[Exception]) -> Iterator[None]:
    """End the command with one line at errors of values and files in the body, and at these."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, *errors)
    try:
        yield
    except kinds as error:
        stop(error)


def why_unusable(path: Path, error: OSError) -> str:
    """The reason why no file can be written below a folder, in words."""
    blocking = next((each for each in (path, *path.parents) if each.is_file()), None)
    if blocking is not None:
        return f"{shown(blocking)} is a file, not a folder"
    if isinstance(error, FileNotFoundError):  # all folders above were to be made
        return "nothing can be made there"
    return (error.strerror or type(error).__name__).lower()


def have_drawn(arguments: Sequence[str], stdin: str = "") -> str | None:
    """Run ``analysis`` in its own process; return why it drew nothing, or ``None``."""
    command = [sys.executable, "-m", "analysis", *arguments]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, errors="replace", check=False
    )
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
    return lines[-1] if done.returncode else None


def check_writable(option: str, file: Path) -> None:
    """Make the file's folder; raises ``ValueError`` if the file cannot be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        existed = file.exists()
        file.open("ab").close()
        if not existed:
            file.unlink()
    except OSError as error:
        why = why_unusable(file.parent, error)
        raise ValueError(f"{option} = {str(file)!r}: cannot be written: {why}") from error


def raise_them() -> None:
    """Raise ``KeyboardInterrupt`` at the first interrupt, and ignore later ones."""
    _on_signals(_interrupt)
    _spare_forks()


@functools.cache
def _spare_forks() -> None:
    """Spare forked processes: a library's helper that SIGTERM ends must not end our cluster."""
    os.register_at_fork(after_in_child=lambda: _on_signals(signal.SIG_DFL))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


def _on_signals(action: Callable[[int, FrameType | None], NoReturn] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)
