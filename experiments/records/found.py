"""Runs on the disk: their files of records, and the records of one."""

from __future__ import annotations

from pathlib import Path

from experiments.records.record import Record, read
from experiments.records.repeats import pooled
from experiments.records.select import chosen

FILE = "records.jsonl"
#: Parts of a run's directory that hold no records, or those of runs since replaced.
_NO_RECORDS = {"cells", "earlier", "report", "wandb"}


def files(path: Path) -> list[Path]:
    """The file itself, the one of the run in a directory, or those of all runs below it.

    Raises ``ValueError`` if there is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory")
    if (path / FILE).is_file():
        return [path / FILE]
    found = sorted(path.rglob(FILE))
    found = [file for file in found if not _NO_RECORDS & set(file.relative_to(path).parts)]
    if not found:
        raise ValueError(f"{path}: holds no {FILE}; python -m experiments run writes them")
    return found


def records(text: str) -> list[Record]:
    """The records of ``RUN`` or ``RUN:CELLS``, repetitions pooled; a run's file or directory.

    ``CELLS`` are settings (``policy=disk``) or a part of an id. Raises ``ValueError`` for what is
    no single run, or has no such cells.
    """
    where, _, pattern = (text, "", "") if Path(text).exists() else text.partition(":")
    found = files(Path(where))
    if len(found) > 1:
        some = ", ".join(str(file.parent) for file in found[:3])
        raise ValueError(f"{where}: holds {len(found)} runs; give one: {some}, …")
    every = pooled(read(found[0]))
    if not every:
        raise ValueError(f"{found[0]}: has no records yet")
    if not pattern:
        return every
    wanted = {cell.id for cell in chosen([record.cell for record in every], pattern, where)}
    return [record for record in every if record.cell_id in wanted]
