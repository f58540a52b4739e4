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

from experiments.clusters.kinds import ClusterKind
from experiments.clusters.kinds import cluster as _cluster
from experiments.clusters.kinds import enter_namespace as _enter_namespace
from experiments.clusters.kinds import override as _override
from experiments.clusters.kinds import preloaded as _preloaded
from experiments.clusters.kinds import simulated_cluster as _simulated_cluster
from experiments.clusters.node_command import node
from experiments.planner.command import plan
from experiments.preflight.command import preflight
from experiments.terminal import console as _console
from experiments.terminal import say as _say
from experiments.terminal import say_error as _say_error
from experiments.terminal import shown as _shown
from experiments.terminal import stop as _stop

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.matrix import Matrix, PlannedCell
    from experiments.records import Record
    from experiments.run_directory import RunDirectory

#: What the report consists of, by the endings of its files.
_KINDS = {".html": "report", ".png": "figure", ".md": "table", ".csv": "table"}
#: Exit status: some cells failed; interrupted.
FAILED, INTERRUPTED = 1, 130


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


app.command()(node)
app.command()(preflight)
app.command(no_args_is_help=True)(plan)


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
    cluster: Annotated[
        ClusterKind | None,
        typer.Option(help="Where to run: the matrix file says, unless this does."),
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
    from experiments.clusters.interface import ClusterError
    from experiments.run_directory import RunDirectory

    try:
        simulated = cluster is ClusterKind.SIMULATED
        plan = matrices.read(matrix, _override(cluster), simulated=simulated)
        cells = runner.select(plan.cells, only)
    except (ValueError, ClusterError) as error:
        _stop(str(error))
    if dry_run:
        _show(plan, cells)
        return
    # Records of one kind of evidence a directory: cells are the same, whoever answers for them.
    apart = "-simulated" * (plan.simulated and plan.cluster.kind != "simulated")
    directory = RunDirectory(output or Path("runs") / f"{plan.name}{apart}")
    with (
        _running(plan, directory),
        _prepared(directory, plan, resume or retry_failed, retry_failed) as finished,
    ):
        records = _run_cells(plan, cells, finished, directory)
        drawn = _finish(records, directory, wandb=not no_wandb)
    _exit_if_failed(records, drawn)


@app.command(context_settings={"ignore_unknown_options": True})
def sweep_cell(
    matrix: Annotated[str, typer.Argument(metavar="MATRIX", help="As for `run`.")],
    settings: Annotated[
        list[str], typer.Argument(metavar="--SETTING=VALUE...", help="Which of its cells to run.")
    ],
) -> None:
    """Run one cell of a matrix for a W&B sweep, as `run MATRIX --resume` would, and write its run.

    Sweeps are in experiments/sweeps; W&B's agent calls this. Exit status: as for `run`.
    """
    from experiments import matrix as matrices
    from experiments import sweep
    from experiments.run_directory import RunDirectory

    try:
        plan = matrices.read(matrix)
        cell = sweep.pick(plan, settings)
    except ValueError as error:
        _stop(str(error))
    directory = RunDirectory(Path("runs") / plan.name)
    with (
        _running(plan, directory),
        _prepared(directory, plan, resume=True, retry_failed=False) as finished,
    ):
        records = _run_cells(plan, [cell], finished, directory)
        _export(_console(), records, directory, sweep.run_id())
    _exit_if_failed(records)


@contextmanager
def _running(plan: Matrix, directory: RunDirectory) -> Iterator[None]:
    """Around a run: the rights it needs, and what to say if it is interrupted."""
    if plan.cluster.kind == "emulated" and not plan.simulated:
        _enter_namespace()
    _on_signals(_interrupt)
    # A library's forked helper that is ended by SIGTERM must not tear our cluster down.
    os.register_at_fork(after_in_child=lambda: _on_signals(signal.SIG_DFL))
    try:
        yield
    except KeyboardInterrupt:
        _stop_interrupted(directory)


def _exit_if_failed(records: Sequence[Record], drawn: bool = True) -> None:
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
            if plan.simulated:
                built = _simulated_cluster(plan.cluster)
            else:
                running = [planned.cell for planned in cells if planned.skip_reason is None]
                built = _cluster(plan.cluster, _preloaded(running))
            return runner.run(cells, finished, built, directory, progress)
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


def _export(
    console: Console,
    records: Sequence[Record],
    directory: RunDirectory,
    sweep_run: str | None = None,
) -> None:
    from experiments import wandb_sink

    report = None if sweep_run else directory.report
    export = wandb_sink.export(records, directory.path, report, sweep_run)
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


@app.command()
def strategies() -> None:
    """List the strategies: engine, versions, and why one cannot run on this machine.

    DeepSpeed has two pins; a cell of a matrix chooses with `deepspeed: current` or `paper`.
    """
    from rich.table import Table

    from baselines import pins, registry

    table = Table("strategy", "engine", "version", "what it is", "here", box=None)
    cuda = registry.has_cuda()
    for entry in registry.ENTRIES:
        for pin in pins.PINS if entry.engine == "deepspeed" else pins.PINS[:1]:
            reason = entry.why_not(cuda=cuda, deepspeed=pin)
            engine_version = entry.engine_version(pin) or "–"
            name, what = (entry.name, entry.what) if pin == "current" else ("", f"the {pin}'s pin")
            table.add_row(name, entry.engine, engine_version, what, reason or "runs")
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
