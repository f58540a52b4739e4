"""Carry records over to today's form of a cell: ``python -m scripts.carry_over FILE ...``.

Settings of strategies, once fields of every cell, go into ``settings`` of those that have them.
Skipped cells that differed only in a setting which their strategy does not have are dropped: they
are no cells of their own any more. Ids name what a cell chooses for its strategy; in older records
their digest alone said it. Else each record's id must stay what it was, or nothing is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from baselines import registry
from baselines.settings import Settings
from experiments.records.record import Record
from simulation import files


def carried_over(lines: Iterable[str | bytes]) -> Iterator[Record]:
    """The records of these lines of JSON, those of today's form as they are.

    Raises ``ValueError`` for a cell that was run with a setting which its strategy does not have,
    and for one whose id would change.
    """
    for line in lines:
        content = json.loads(line)
        if "settings" in content["cell"]:
            yield _named(Record.model_validate(content))
            continue
        foreign = _move(content["cell"])
        if foreign and content["state"] == "skipped":
            continue
        if foreign:
            raise ValueError(f"{content['cell_id']}: ran with {foreign}, which it does not have")
        yield _named(Record.model_validate(content))


def _named(record: Record) -> Record:
    """The record with today's id, which may differ from its own in the choices that it names."""
    before, after = record.cell_id, record.cell.id
    if before == after:
        return record
    end = f"-{record.cell.tuning}-{record.cell.model.name}-"
    if after.partition(end)[2] != before.partition(end)[2] or not record.cell.choices:
        raise ValueError(f"{before}: would become {after}")
    return record.model_copy(update={"cell_id": after})


def _move(cell: dict[str, Any]) -> dict[str, Any]:
    """Move the strategy's own settings; return others that are not at their defaults."""
    own = registry.find(cell["strategy"]).settings.model_fields
    given = {name: cell.pop(name) for name in registry.setting_names() if name in cell}
    cell["settings"] = {name: value for name, value in given.items() if name in own}
    return {
        name: value for name, value in given.items() if name not in own and value != _default(name)
    }


def _default(setting: str) -> Any:
    kinds: tuple[type[Settings], ...] = registry.settings_types()
    return next(k.model_fields[setting].default for k in kinds if setting in k.model_fields)


def main() -> None:
    """Rewrite the files in place; one that cannot be carried over stays as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    for file in parser.parse_args().files:
        before = files.lines(file)
        records = list(carried_over(before))
        files.write(records, file)
        files.compress(file)
        print(f"{file}: {len(records)} of {len(before)} records")


if __name__ == "__main__":
    main()
