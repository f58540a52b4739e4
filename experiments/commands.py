"""The commands of ``python -m experiments`` that need no file of their own.

Only what the command line itself needs is imported here: the rest waits until it is used, so that
help and mistakes are answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments import interrupts, session, terminal
from experiments.clusters import kinds
from experiments.clusters.kinds import ClusterKind

if TYPE_CHECKING:
    from experiments.matrix import Matrix, PlannedCell
    from experiments.records import Record

#: Exit status: some cells failed.
FAILED = 1


def run(
    matrix: Annotated[
        str,
        typer.Argument(
            metavar="MATRIX", help="A name in experiments/matrices, of a folder there, or a path."
        ),
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

    A folder of matrices is a suite, such as `paper`: they run one after another, into DIR/NAME.

    Without --resume the matrix starts afresh, and what an earlier run left in DIR moves to
    DIR/earlier/TIME. Exit status: 0; 1 if a cell failed or timed out, if its losses are not those
    of the matrix's reference, or if the report could not be drawn; 2 if the run cannot start or go
    on; 130 if interrupted (go on with --resume).
    """
    from experiments import matrix_files
    from experiments.clusters.interface import ClusterError

    try:
        plans = [_read(name, cluster) for name in matrix_files.members(matrix)]
        chosen = _select(plans, only)
    except (ValueError, ClusterError) as error:
        terminal.stop(str(error))
    if dry_run:
        for plan, cells in chosen:
            session.show(plan, cells)
        return
    well = True
    for plan, cells in chosen:
        path = _path(plan, output, suite=len(plans) > 1)
        resumed = resume or retry_failed
        with session.opened(plan, path, resume=resumed, retry_failed=retry_failed) as opened:
            directory, finished = opened
            records = session.run_cells(plan, cells, finished, directory)
            drawn = session.finish(records, directory, wandb=not no_wandb)
            reached = session.reach_reference(plan, directory)
        well &= drawn and reached and not _any_failed(records)
    if not well:
        raise typer.Exit(FAILED)


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

    try:
        plan = matrices.read(matrix)
        cell = sweep.pick(plan, settings)
    except ValueError as error:
        terminal.stop(str(error))
    with session.opened(plan, Path("runs") / plan.name, resume=True) as (directory, finished):
        records = session.run_cells(plan, [cell], finished, directory)
        session.export(terminal.console(), records, directory, sweep.run_id())
    if _any_failed(records):
        raise typer.Exit(FAILED)


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
    terminal.console().print(table)


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

    interrupts.raise_them()
    try:
        settled = command.run(model or [], strategy or [], output, jobs, terminal.console())
    except (ValueError, OSError) as error:
        terminal.stop(str(error))
    except KeyboardInterrupt:
        terminal.say_error("interrupted: finished cases are kept; the same command goes on")
        raise typer.Exit(interrupts.INTERRUPTED) from None
    terminal.say(terminal.console(), "records", output / "memory.jsonl")
    if any(record.state == "failed" for record in settled):
        raise typer.Exit(FAILED)


def _read(name: str, cluster: ClusterKind | None) -> Matrix:
    """The matrix, on the kind of cluster that is asked for."""
    from experiments import matrix as matrices

    simulated = cluster is ClusterKind.SIMULATED
    plan = matrices.read(name, kinds.override(cluster), simulated=simulated)
    if cluster is ClusterKind.EMULATED:
        return matrices.read(name, kinds.emulated(plan.cluster))
    return plan


def _select(plans: Sequence[Matrix], only: str | None) -> list[tuple[Matrix, list[PlannedCell]]]:
    """The matrices with the cells asked for; one without any is left out."""
    from experiments import runner

    every = [planned for plan in plans for planned in plan.cells]
    wanted = {planned.cell.id for planned in runner.select(every, only)}
    found = [(plan, [p for p in plan.cells if p.cell.id in wanted]) for plan in plans]
    return [(plan, cells) for plan, cells in found if cells]


def _path(plan: Matrix, output: Path | None, *, suite: bool) -> Path:
    """Where a matrix's records, logs and report go."""
    if output is not None:
        return output / Path(plan.name).name if suite else output
    # Records of one kind of evidence a directory: cells are the same, whoever answers for them.
    apart = "-simulated" * (plan.simulated and plan.cluster.can.start_processes)
    return Path("runs") / f"{plan.name}{apart}"


def _any_failed(records: Sequence[Record]) -> bool:
    return any(record.state in ("failed", "timeout") for record in records)
