"""Runs on the disk, and cells picked by a part of their ids or by settings: ``policy=disk,k=4``."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from experiments.records.cell import FILE_NAMES, Cell
from experiments.records.comparison import pooled
from experiments.records.record import Record, read
from experiments.records.settings import Described, described
from simulation import files as jsonl
from simulation import quantities

#: Aliases of settings, as matrix files and ids have them.
_ALIASES = {
    "k": "accumulation",
    "link": "inter_bandwidth_bits_per_s",
    "length": "sequence_length",
    **{file: field for field, file in FILE_NAMES.items()},
}
#: Links, which matrix files write with their units.
_LINKS = ("inter_bandwidth_bits_per_s", "inter_group_bandwidth_bits_per_s")
_SETTINGS = re.compile(r"\w+=")


def chosen(cells: Sequence[Cell], pattern: str, option: str = "--only") -> list[Cell]:
    """The cells that ``pattern`` selects, at least one.

    Settings and their values, with commas between, select cells that have them all; one that is
    given twice may have either value. Anything else is a part of an id, or a glob that ids match.
    Raises ``ValueError`` where there is no such setting, or no such cell.
    """
    if not pattern.strip():
        raise ValueError(
            f"{option}: picks no cell; give settings, such as policy=disk, or a part of an id"
        )
    if _SETTINGS.match(pattern):
        return _with_settings(cells, pattern, option)
    matches = [cell for cell in cells if pattern in cell.id or fnmatchcase(cell.id, pattern)]
    if not matches:
        raise ValueError(
            f"{option}: no cell id matches {pattern!r}; an id looks like {cells[0].id!r}"
        )
    return matches


def _with_settings(cells: Sequence[Cell], pattern: str, option: str) -> list[Cell]:
    accepted: dict[str, list[str]] = {}
    by_name = described(Cell)
    known = {**by_name, **_ALIASES}
    for part in quantities.each(option, pattern, quantities.name):
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(
                f"{option}: {part!r} is not a setting and its value, as in policy=disk"
            )
        if (name := name.strip()) not in known:
            raise ValueError(f"{option}: there is no setting {quantities.choice(name, known)}")
        accepted.setdefault(_ALIASES.get(name, name), []).append(value.strip())
    left = list(cells)
    for name, values in accepted.items():
        item, before = by_name[name], left
        left = [cell for cell in before if any(_has(item, cell, value) for value in values)]
        if not left:
            there = dict.fromkeys(item.written(item.of(cell)) for cell in before)
            raise ValueError(
                f"{option}: no cell has {name} {values[-1]!r}; there are {', '.join(there)}"
            )
    return left


def _has(item: Described, cell: Cell, value: str) -> bool:
    actual = item.of(cell)
    if item.name in _LINKS:
        return value == str(actual) if value.isdigit() else actual == quantities.link(value)
    return actual is not None and value in (str(actual), item.written(actual), str(actual).lower())


#: Files of a run: a record per cell, and the simulator's predictions of the same cells.
FILE, PREDICTIONS = "records.jsonl", "predicted.jsonl"
#: Parts of a run's directory that hold no records, or those of runs since replaced.
_NO_RECORDS = {"cells", "earlier", "report", "wandb"}


def files(path: Path) -> list[Path]:
    """Files of records: the file itself, that of the run in a directory, or of all runs below it.

    Raises ``ValueError`` if there is none.
    """
    file = jsonl.stored(path / FILE if path.is_dir() else path)
    if file.is_file():
        return [file]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory")
    paths = jsonl.below(path, FILE)
    paths = [file for file in paths if not _NO_RECORDS & set(file.relative_to(path).parts)]
    if not paths:
        raise ValueError(f"{path}: holds no {FILE}; python -m experiments run writes them")
    return paths


def records(text: str) -> list[Record]:
    """The records of ``RUN`` or ``RUN:CELLS``, repetitions pooled; a run's file or directory.

    ``CELLS`` are settings (``policy=disk``) or a part of an id. Raises ``ValueError`` for what is
    no single run, or has no such cells.
    """
    where, _, pattern = (text, "", "") if Path(text).exists() else text.partition(":")
    paths = files(Path(where))
    if len(paths) > 1:
        some = ", ".join(str(file.parent) for file in paths[:3])
        raise ValueError(f"{where}: holds {len(paths)} runs; give one: {some}, …")
    pooled_records = pooled(read(paths[0]))
    if not pooled_records:
        raise ValueError(f"{paths[0]}: has no records yet")
    if not pattern:
        return pooled_records
    ids = {cell.id for cell in chosen([record.cell for record in pooled_records], pattern, where)}
    return [record for record in pooled_records if record.cell_id in ids]
