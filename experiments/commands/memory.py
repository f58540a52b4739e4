"""``python -m experiments memory``: settles the study's cases, shows and records them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import terminal
from experiments.records import provenance
from experiments.records.cell import Cell
from simulation import files
from simulation.imitated import study
from simulation.imitated.records import Case, MemoryRecord, read
from simulation.models import PAPER_MODELS, find

if TYPE_CHECKING:
    import torch.nn as nn


def memory(
    model: Annotated[
        list[str] | None, typer.Option(help="Only this model of the paper's (repeatable).")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only this strategy (repeatable).")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Only sequences of so many tokens: 512, 1024 or 2048 (repeatable)."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where memory.jsonl goes.")] = Path(
        "runs/memory"
    ),
    processes: Annotated[int, typer.Option(min=1, help="Cases at a time; each takes a core.")] = 2,
) -> None:
    """Find the largest micro-batch of the paper's models, by strategy, without a GPU.

    The real training step of one of 32 ranks runs on tensors without contents. Cases that
    DIR/memory.jsonl has already are not run again. Exit status: 1 if a case failed.
    """
    terminal.raise_them()
    selection = model or [], strategy or [], length or []
    try:
        with terminal.stopping():
            settled = settle(*selection, output, processes, terminal.console())
    except KeyboardInterrupt:
        terminal.say_error("interrupted: finished cases are kept; the same command goes on")
        raise typer.Exit(terminal.INTERRUPTED) from None
    terminal.say("records", output / "memory.jsonl")
    if any(record.state == "failed" for record in settled):
        raise typer.Exit(terminal.FAILED)


def settle(
    models: Sequence[str],
    strategies: Sequence[str],
    lengths: Sequence[int],
    output: Path,
    processes: int,
    console: Console,
) -> list[MemoryRecord]:
    """Settle what has no record in ``output`` yet; write ``memory.jsonl``, and show all of it.

    Raises ``ValueError`` for an unknown model, strategy or length, for a file that is not ours, and
    if ``output`` cannot be written.
    """
    names = dict.fromkeys(models or PAPER_MODELS)
    cases = study.cases(
        [find(name) for name in names],
        list(dict.fromkeys(strategies)) or None,
        list(dict.fromkeys(lengths)) or study.SEQUENCE_LENGTHS,
    )
    file = output / "memory.jsonl"
    terminal.check_writable("--output", file)
    known = {record.case: record for record in (read(file) if files.stored(file).exists() else [])}
    pending = [case for case in cases if case not in known]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("memory", total=len(cases), completed=len(cases) - len(pending))
        for record in _settled(pending, processes):
            files.append(record, file)
            known[record.case] = record
            case = record.case
            largest = "" if record.finding is None else record.finding.largest_micro_batch
            progress.console.print(
                f"{case.label} {case.model.name} {case.sequence_length} {case.tuning}"
                f"{' checkpointing' * case.checkpointing}: {record.state} {largest}",
                highlight=False,
            )
            progress.advance(bar)
    for title, rows in study.tables(known[case] for case in cases).items():
        shown = terminal.table(study.HEAD, title=title)
        for row in rows:
            shown.add_row(*row)
        console.print(shown)
    return [known[case] for case in cases]


def _settled(pending: Sequence[Case], processes: int) -> Iterator[MemoryRecord]:
    """The cases' records, which tell nothing of this machine but versions."""
    origin = provenance.gather()
    for record in study.settle(
        pending, processes, build, commit=origin.commit, versions=origin.versions
    ):
        error = None if record.error is None else provenance.scrub(record.error)
        yield record.model_copy(update={"error": error})


def build(case: Case) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The case's model and its transformer blocks."""
    from experiments.worker import models  # needs torch, for which the command itself need not wait

    return models.build(Cell.of_case(case))
