"""A command's run of one matrix: its rights, its directory, its progress, what it leaves."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import typer

from experiments import terminal, tracking
from experiments.clusters import lifetimes
from experiments.clusters.interface import ClusterError, LostNodeError
from experiments.commands import kinds
from experiments.matrix.reader import Matrix
from experiments.records import parity
from experiments.records.cell import Cell
from experiments.records.comparison import pooled
from experiments.records.record import Record, read
from experiments.runner import runner
from experiments.runner.directory import RunDirectory
from experiments.terminal.progress import Progress
from experiments.terminal.summary_table import summary

#: Parts of the report by the endings of their files.
_KINDS = {".html": "report", ".png": "figure", ".md": "table", ".csv": "table"}


@contextmanager
def opened(
    matrix: Matrix, path: Path, *, resume: bool, retry_failed: bool = False
) -> Iterator[tuple[RunDirectory, list[Record]]]:
    """Lock the directory and make it ready; yields it and the records of cells not to run again.

    Ends the command with what to do where it cannot run here, or is interrupted.
    """
    directory = RunDirectory(path)
    if matrix.cluster.can.make_nodes and not matrix.simulated:
        kinds.enter_namespace()
    lifetimes.remove_stale()
    terminal.raise_them()
    with ExitStack() as stack:
        try:
            stack.enter_context(directory.locked())
            finished = directory.resume(matrix, retry_failed) if resume else []
            archive = None if resume else directory.start_afresh()
        except OSError as error:
            terminal.stop(
                f"--output = {str(path)!r}: records cannot be written there: "
                f"{terminal.why_unusable(path, error)}"
            )
        except ValueError as error:
            terminal.stop(error)
        if archive is not None:
            typer.echo(f"the earlier run is now in {terminal.shown(archive)}")
        try:
            yield directory, finished
        except KeyboardInterrupt:
            terminal.say_error(
                f"interrupted: the cluster is torn down, {terminal.shown(directory.records)} is "
                "kept\ngo on with the same command and --resume"
            )
            raise typer.Exit(terminal.INTERRUPTED) from None


def run_cells(
    matrix: Matrix,
    cells: Sequence[Cell],
    finished: Sequence[Record],
    directory: RunDirectory,
    *,
    wandb: bool = True,
) -> list[Record]:
    """Run the cells that have no record yet, and show how far they are, on ``wandb`` too."""
    if not matrix.simulated and (busy := runner.look().why_busy):
        warning = (
            f"this machine is busy: {busy}; times will vary, and a difference within the spread "
            "of the steps is shown as none"
        )
        terminal.say_as_it_is(warning, "yellow")
    console = terminal.console()
    try:
        with Progress(matrix, cells, finished, console) as progress, ExitStack() as stack:
            observers: list[runner.Observer] = [progress]
            if wandb and not matrix.simulated:
                link = partial(
                    console.print, style="dim", soft_wrap=True, highlight=False, markup=False
                )
                live = tracking.Live(directory.path, link)
                observers.append(stack.enter_context(live))
            running = [cell for cell in cells if cell.id not in matrix.skipped]
            built = kinds.cluster(matrix.cluster, kinds.preloaded(running), matrix.simulated)
            return runner.run(cells, matrix.skipped, finished, built, directory, *observers)
    except (ClusterError, runner.RunError) as error:
        lost = isinstance(error.__cause__ or error, LostNodeError)
        terminal.stop(error, terminal.LOST if lost else terminal.UNUSABLE)


def finish(records: Sequence[Record], directory: RunDirectory, *, wandb: bool) -> bool:
    """Show the table, write W&B's runs and the report; return whether the report was drawn."""
    console = terminal.console()
    console.print()
    console.print(summary(pooled(records)))
    console.print()
    terminal.say("records", directory.records)
    drawn = draw(directory)
    if not wandb:
        return drawn
    exported = tracking.export(records, directory.path, directory.report)
    for warning in exported.warnings:
        console.print(f"W&B: {warning}", style="yellow", soft_wrap=True, markup=False)
    if exported.mode != "disabled" and exported.whole:
        terminal.say("W&B", directory.wandb)
        if exported.mode == "offline" and directory.wandb.exists():
            hint = (
                f"         upload with: wandb sync {terminal.shown(directory.wandb)}/offline-run-*"
            )
            terminal.say_as_it_is(hint, "dim")
    return drawn


def reach_reference(matrix: Matrix, directory: RunDirectory) -> bool:
    """Say which cells do not reach the losses of the matrix's reference; return whether all do.

    All cells that the directory has records of are compared, whichever run has left them.
    """
    if matrix.reference is None or matrix.simulated:
        return True
    parities = parity.compare(read(directory.records), matrix.reference)
    for of in parities:
        for problem in of.problems:
            terminal.say_error(f"{of.record.cell_id}: {problem}")
    well = sum(not of.problems for of in parities)
    terminal.console().print(
        f"losses   {well} of {len(parities)} cells reach {matrix.reference}'s", highlight=False
    )
    return well == len(parities)


def draw(directory: RunDirectory) -> bool:
    """Run ``analysis``, which draws the report, in its own process; return whether it did."""
    source, records = str(directory.records), terminal.shown(directory.records)
    reason = terminal.have_drawn(["report", source, "--output", str(directory.report)])
    if reason is not None:
        terminal.say_error(f"the report could not be drawn: {reason}")
        terminal.say_error(f"try again with: python -m analysis report {records}")
        return False
    for file in sorted(directory.report.rglob("*")):
        if (kind := _KINDS.get(file.suffix)) is not None:
            terminal.say(kind, file)
    terminal.say_as_it_is(f"claims   python -m analysis check {records}", "dim")
    return True
