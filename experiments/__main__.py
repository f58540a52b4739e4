"""``python -m experiments``: run a matrix of cells on a cluster.

Only what the command line itself needs is imported here: the rest waits until it is used, so that
help and mistakes are answered at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.clusters.interface import Cluster
    from experiments.matrix import Matrix, PlannedCell
    from experiments.records import ClusterSpec, Record
    from experiments.run_directory import RunDirectory

#: Imported once by the cluster, before the first cell; the ranks of all cells start from there.
PRELOADED = (
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
    "deepspeed",
)
#: What the report consists of, by the endings of its files.
_KINDS = {".html": "report", ".png": "figure", ".md": "table", ".csv": "table"}
#: Exit status: some cells failed; the user or the machine has to change something; interrupted.
FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def main() -> None:
    """FCDP next to other ZeRO-3 strategies: matrices of cells on a cluster, and their records."""


@app.command(no_args_is_help=True)
def run(
    matrix: Annotated[
        str, typer.Argument(metavar="MATRIX", help="A name in experiments/matrices, or a path.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where records, logs and report go (runs/MATRIX)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Run only the cells that have no record yet.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="--resume, and run failed and timed-out ones.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Only cells whose id contains or matches this."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the cells and start nothing.")
    ] = False,
    no_wandb: Annotated[
        bool,
        typer.Option("--no-wandb", help="Write no W&B runs (offline ones, unless WANDB_MODE)."),
    ] = False,
) -> None:
    """Run a matrix: every cell in fresh processes, then table, figures, report and W&B runs.

    Without --resume the matrix starts afresh, and what an earlier run left in DIR moves to
    DIR/earlier/TIME. Exit status: 0; 1 if a cell failed or timed out or the report could not be
    drawn; 2 if the run cannot start or go on; 130 if interrupted (go on with --resume).
    """
    from experiments import matrix as matrices
    from experiments import runner
    from experiments.run_directory import RunDirectory

    try:
        plan = matrices.read(matrix)
        cells = runner.select(plan.cells, only)
    except ValueError as error:
        _stop(str(error))
    if dry_run:
        _show(plan, cells)
        return
    directory = RunDirectory(output or Path("runs") / plan.name)
    _enter_namespace()
    _on_signals(_interrupt)
    # A library's forked helper that is ended by SIGTERM must not tear our cluster down.
    os.register_at_fork(after_in_child=lambda: _on_signals(signal.SIG_DFL))
    try:
        with _prepared(directory, plan, resume or retry_failed, retry_failed) as finished:
            records = _run_cells(plan, cells, finished, directory)
            drawn = _finish(records, directory, wandb=not no_wandb)
    except KeyboardInterrupt:
        _stop_interrupted(directory)
    if not drawn or any(record.state in ("failed", "timeout") for record in records):
        raise typer.Exit(FAILED)


@contextmanager
def _prepared(
    directory: RunDirectory, plan: Matrix, resume: bool, retry_failed: bool
) -> Iterator[list[Record]]:
    """Lock the directory and make it ready; yields the records of the cells not to run again."""
    with ExitStack() as stack:
        try:
            stack.enter_context(directory.locked())
            finished = directory.resume(plan.name, retry_failed) if resume else []
            archive = None if resume else directory.start_afresh()
        except (ValueError, OSError) as error:
            _stop(str(error))
        if archive is not None:
            typer.echo(f"the earlier run is now in {_shown(archive)}")
        yield finished


def _run_cells(
    plan: Matrix,
    cells: Sequence[PlannedCell],
    finished: Sequence[Record],
    directory: RunDirectory,
) -> list[Record]:
    from experiments import runner
    from experiments.clusters.interface import ClusterError
    from experiments.progress import Progress

    try:
        with Progress(plan, cells, finished, _console()) as progress:
            return runner.run(cells, finished, _cluster(plan.cluster), directory, progress)
    except (ClusterError, runner.RunError) as error:
        _stop(str(error))


def _finish(records: Sequence[Record], directory: RunDirectory, wandb: bool) -> bool:
    """Show the table, write W&B's runs and the report; return whether the report was drawn."""
    from experiments.summary_table import summary

    console = _console()
    console.print()
    console.print(summary(records))
    console.print()
    _say(console, "records", directory.records)
    drawn = _draw(console, directory)
    if wandb:
        _export(console, records, directory)
    return drawn


def _draw(console: Console, directory: RunDirectory) -> bool:
    command = [sys.executable, "-m", "analysis", "report", str(directory.records)]
    result = subprocess.run(
        [*command, "--output", str(directory.report)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        reason = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        _say_error(f"the report could not be drawn: {reason[-1]}")
        _say_error(f"try again with: python -m analysis report {_shown(directory.records)}")
        return False
    for file in sorted(directory.report.rglob("*")):
        kind = _KINDS.get(file.suffix)
        if kind is not None:
            _say(console, kind, file)
    return True


def _export(console: Console, records: Sequence[Record], directory: RunDirectory) -> None:
    from experiments import wandb_sink

    export = wandb_sink.export(records, directory.path)
    for warning in export.warnings:
        console.print(f"W&B: {warning}", style="yellow", soft_wrap=True, markup=False)
    if export.mode == "disabled":
        return
    _say(console, "W&B", directory.wandb)
    if export.mode == "offline" and directory.wandb.exists():
        console.print(
            f"         upload with: wandb sync {_shown(directory.wandb)}/offline-run-*",
            style="dim",
            soft_wrap=True,
            highlight=False,
        )


def _show(plan: Matrix, cells: Sequence[PlannedCell]) -> None:
    console = _console()
    running = [planned for planned in cells if planned.skip_reason is None]
    for planned in cells:
        reason = "" if planned.skip_reason is None else f"  skipped: {planned.skip_reason}"
        style = "dim" if reason else ""
        text = f"{planned.cell.id}{reason}"
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)
    skipped = len(cells) - len(running)
    steps = sum(planned.cell.warmup_steps + planned.cell.steps for planned in running)
    console.print(
        f"{plan.name}: {len(running)} cells to run, {steps} steps in all, {skipped} skipped",
        style="bold",
        highlight=False,
    )


def _cluster(spec: ClusterSpec) -> Cluster:
    from experiments.clusters.emulated import EmulatedCluster

    return EmulatedCluster(spec, preload=PRELOADED)


@app.command()
def strategies() -> None:
    """List the strategies: engine, version, and why one cannot run on this machine."""
    from rich.table import Table

    from baselines import registry

    table = Table("strategy", "engine", "version", "what it is", "here", box=None)
    cuda = registry.has_cuda()
    for entry in registry.ENTRIES:
        reason = entry.why_not(cuda=cuda)
        table.add_row(
            entry.name, entry.engine, entry.engine_version or "–", entry.what, reason or "runs"
        )
    _console().print(table)


@app.command()
def memory(
    model: Annotated[
        list[str] | None, typer.Option(help="Only this model of the paper's (repeatable).")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only this strategy (repeatable).")
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="Where memory.jsonl and memory.md go.")
    ] = Path("runs/memory"),
    jobs: Annotated[int, typer.Option(min=1, help="Cases at a time; each takes a core.")] = 2,
) -> None:
    """Find the largest micro-batch of the paper's models, by strategy, without a GPU.

    The real training step of one of 32 ranks runs on tensors without contents. Cases that
    DIR/memory.jsonl has already are not run again. Exit status: 1 if a case failed.
    """
    from experiments.memory import command

    _on_signals(_interrupt)
    try:
        settled = command.run(model or [], strategy or [], output, jobs, _console())
    except ValueError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        _say_error("interrupted: finished cases are kept; the same command goes on")
        raise typer.Exit(INTERRUPTED) from None
    _say(_console(), "records", output / "memory.jsonl")
    if any(record.state == "failed" for record in settled):
        raise typer.Exit(FAILED)


def _enter_namespace() -> None:
    """Become able to build the cluster; this starts the command anew where it is not yet."""
    from experiments.clusters import privileges
    from experiments.clusters.interface import ClusterError

    try:
        privileges.enter_user_namespace_if_needed()
    except ClusterError as error:
        _stop(str(error))


def _console() -> Console:
    from rich.console import Console

    # A log has no width of its own; rich would take 80.
    return Console() if sys.stdout.isatty() else Console(width=120, force_interactive=False)


def _say(console: Console, what: str, path: Path) -> None:
    console.print(f"{what:<8} {_shown(path)}", soft_wrap=True, highlight=False, markup=False)


def _shown(path: Path) -> str:
    """The path as seen from here, if it is below."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _say_error(message: str) -> None:
    typer.secho(message, fg="red", err=True)


def _stop(message: str) -> NoReturn:
    _say_error(f"error: {message}")
    raise typer.Exit(UNUSABLE)


def _stop_interrupted(directory: RunDirectory) -> NoReturn:
    _say_error(
        f"interrupted: the cluster is torn down, {_shown(directory.records)} is kept\n"
        "go on with the same command and --resume"
    )
    raise typer.Exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End on SIGTERM as on Ctrl-C; a second one does not cut the cluster's teardown short."""
    _on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


def _on_signals(action: Callable[[int, FrameType | None], NoReturn] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, action)


if __name__ == "__main__":
    app()
