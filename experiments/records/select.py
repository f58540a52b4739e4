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

#: Other names of settings than their own: as matrix files and ids have them.
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
    """The cells that ``pattern`` means, at least one.

    Settings and their values, with commas between, mean cells that have them all; a setting that is
    given twice may have either value. Anything else is a part of an id, or a glob that ids match.
    Raises ``ValueError`` where there is no such setting, or no such cell.
    """
    if not pattern.strip():
        raise ValueError(
            f"{option}: picks no cell; give settings, such as policy=disk, or a part of an id"
        )
    if _SETTINGS.match(pattern):
        return _with_settings(cells, pattern, option)
    found = [cell for cell in cells if pattern in cell.id or fnmatchcase(cell.id, pattern)]
    if not found:
        raise ValueError(
            f"{option}: no cell id matches {pattern!r}; an id looks like {cells[0].id!r}"
        )
    return found


def _with_settings(cells: Sequence[Cell], pattern: str, option: str) -> list[Cell]:
    wanted: dict[str, list[str]] = {}
    every = described(Cell)
    known = {**every, **_ALIASES}
    for part in quantities.each(option, pattern, quantities.name):
        name, separator, value = part.partition("=")
        if not separator:
            raise ValueError(
                f"{option}: {part!r} is not a setting and its value, as in policy=disk"
            )
        if (name := name.strip()) not in known:
            raise ValueError(f"{option}: there is no setting {quantities.choice(name, known)}")
        wanted.setdefault(_ALIASES.get(name, name), []).append(value.strip())
    left = list(cells)
    for name, values in wanted.items():
        item, before = every[name], left
        left = [cell for cell in before if any(_has(item, cell, value) for value in values)]
        if not left:
            there = dict.fromkeys(item.written(item.of(cell)) for cell in before)
            raise ValueError(
                f"{option}: no cell has {name} {values[-1]!r}; there are {', '.join(there)}"
            )
    return left


def _has(item: Described, cell: Cell, value: str) -> bool:
    own = item.of(cell)
    if item.name not in _LINKS:
        return own is not None and value in (str(own), item.written(own), str(own).lower())
    return value == str(own) if value.isdigit() else own == quantities.link(value)


#: Files of a run: a record per cell, and what the simulator says of the same cells.
FILE, PREDICTIONS = "records.jsonl", "predicted.jsonl"
#: Parts of a run's directory that hold no records, or those of runs since replaced.
_NO_RECORDS = {"cells", "earlier", "report", "wandb"}


def files(path: Path) -> list[Path]:
    """The file itself, the one of the run in a directory, or those of all runs below it.

    Raises ``ValueError`` if there is none.
    """
    file = jsonl.stored(path / FILE if path.is_dir() else path)
    if file.is_file():
        return [file]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory")
    found = jsonl.below(path, FILE)
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
