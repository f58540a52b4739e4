"""``python -m experiments memory``: settle the cases, show them, keep them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments import destination, paper_models, records
from experiments.memory import study, table
from experiments.memory.records import MemoryRecord, read


def run(
    models: Sequence[str], strategies: Sequence[str], output: Path, jobs: int, console: Console
) -> list[MemoryRecord]:
    """Settle what has no record in ``output`` yet; write ``memory.jsonl`` and ``memory.md``.

    Raises ``ValueError`` for an unknown model or strategy, for a file that is not ours, and if
    ``output`` cannot be written.
    """
    names = dict.fromkeys(models or paper_models.PAPER_MODELS)
    cases = study.cases([paper_models.find(name) for name in names], strategies or None)
    file, page = output / "memory.jsonl", output / "memory.md"
    for written in (file, page):
        destination.check("--output", written)
    known = {record.case: record for record in (read(file) if file.exists() else [])}
    pending = [case for case in cases if case not in known]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("memory", total=len(cases), completed=len(cases) - len(pending))
        for record in study.settle(pending, jobs):
            records.append(record, file)
            known[record.case] = record
            case = record.case
            largest = "" if record.finding is None else record.finding.largest_micro_batch
            progress.console.print(
                f"{case.label} {case.model.name} {case.tuning}"
                f"{' checkpointing' * case.checkpointing}: {record.state} {largest}",
                highlight=False,
            )
            progress.advance(bar)
    for part in table.tables(known[case] for case in cases):
        console.print(_rich(part))
    # Of all that the file holds, in one order, whatever was asked for this time.
    everything = sorted(known.values(), key=study.place)
    page.write_text(table.markdown(everything), encoding="utf-8")
    return [known[case] for case in cases]


def _rich(part: table.Table) -> Table:
    shown = Table(*part.head, title=part.title, box=None)
    for row in part.rows:
        shown.add_row(*row)
    return shown
